"""The `mosaic_tpu` backend: Pallas kernels compiled by Mosaic for TPU v4 to v7x."""

from __future__ import annotations

from collections.abc import Iterable

from opmux.core.implementation import BackendInfo, Implementation
from opmux.plugins.mosaic_tpu import attention_config, chunk_fwd_h_config, dense_config, matmul_config
from opmux.registry import hookimpl

_FIRST_ON_TPU = {"tpu": 20}


@hookimpl
def opmux_backend() -> BackendInfo:
    """What the backend is."""
    return BackendInfo(
        "mosaic_tpu",
        summary="Pallas kernels for TPU v4 to v7x",
        platforms=("tpu",),
        tier="kernel",
        simulator="opmux.plugins.mosaic_tpu.simulator:simulate",
        install_hint="pip install 'jax[tpu]'",
    )


@hookimpl
def opmux_implementations() -> Iterable[Implementation]:
    """One implementation an op, and one a backward, but for those that XLA fuses: of `add` and `reduce`."""
    yield Implementation(
        op="add",
        kernel="opmux.plugins.mosaic_tpu.add:add",
        supports=dense_config.supports_add,
        config=dense_config.AddConfig,
        default_config=dense_config.default_add_config,
        priority=_FIRST_ON_TPU,
    )
    yield Implementation(
        op="reduce",
        kernel="opmux.plugins.mosaic_tpu.reduce:reduce",
        supports=dense_config.supports_reduce,
        config=dense_config.ReduceConfig,
        default_config=dense_config.default_reduce_config,
        priority=_FIRST_ON_TPU,
    )
    yield Implementation(
        op="chunk_fwd_h",
        kernel="opmux.plugins.mosaic_tpu.chunk_fwd_h:chunk_fwd_h",
        supports=chunk_fwd_h_config.supports,
        config=chunk_fwd_h_config.ChunkFwdHConfig,
        default_config=chunk_fwd_h_config.default_config,
        priority=_FIRST_ON_TPU,
    )
    yield Implementation(
        op="chunk_fwd_h_vjp",
        kernel="opmux.plugins.mosaic_tpu.chunk_fwd_h_vjp:chunk_fwd_h_vjp",
        supports=chunk_fwd_h_config.supports_vjp,
        config=chunk_fwd_h_config.ChunkFwdHVjpConfig,
        default_config=chunk_fwd_h_config.default_vjp_config,
        priority=_FIRST_ON_TPU,
    )
    yield Implementation(
        op="attention",
        kernel="opmux.plugins.mosaic_tpu.attention:attention",
        supports=attention_config.supports,
        config=attention_config.AttentionConfig,
        default_config=attention_config.default_config,
        priority=_FIRST_ON_TPU,
    )
    yield Implementation(
        op="attention_vjp",
        kernel="opmux.plugins.mosaic_tpu.attention_vjp:attention_vjp",
        supports=attention_config.supports,
        config=attention_config.AttentionVjpConfig,
        default_config=attention_config.default_vjp_config,
        priority=_FIRST_ON_TPU,
    )
    yield Implementation(
        op="matmul",
        kernel="opmux.plugins.mosaic_tpu.matmul:matmul",
        supports=matmul_config.supports_matmul,
        config=matmul_config.MatmulConfig,
        default_config=matmul_config.default_matmul_config,
        priority=_FIRST_ON_TPU,
    )
    yield Implementation(
        op="matmul_vjp",
        kernel="opmux.plugins.mosaic_tpu.matmul_vjp:matmul_vjp",
        supports=matmul_config.supports_matmul_vjp,
        config=matmul_config.MatmulVjpConfig,
        default_config=matmul_config.default_matmul_vjp_config,
        priority=_FIRST_ON_TPU,
    )
