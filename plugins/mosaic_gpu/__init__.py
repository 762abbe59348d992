"""The `mosaic_gpu` backend: Pallas Mosaic kernels for NVIDIA GPUs of compute capability 9.0 and 10.x."""

from __future__ import annotations

from collections.abc import Iterable

from opmux.core.implementation import BackendInfo, Implementation
from opmux.plugins.mosaic_gpu import add_config, attention_config, chunk_fwd_h_config, matmul_config, reduce_config
from opmux.registry import hookimpl

_FIRST_ON_CUDA = {"cuda": 20}


@hookimpl
def opmux_backend() -> BackendInfo:
    """What the backend is."""
    return BackendInfo(
        "mosaic_gpu",
        summary="Pallas Mosaic GPU kernels: TMA, warp specialization",
        platforms=("cuda",),
        tier="kernel",
        simulator="opmux.plugins.mosaic_gpu.simulator:simulate",
        install_hint="pip install 'jax[cuda13]' absl-py; absl-py alone for the simulator",
    )


@hookimpl
def opmux_implementations() -> Iterable[Implementation]:
    """One implementation an op, and backward kernels of those whose forwards have products."""
    yield Implementation(
        op="add",
        kernel="opmux.plugins.mosaic_gpu.add:add",
        supports=add_config.supports,
        config=add_config.AddConfig,
        default_config=add_config.default_config,
        priority=_FIRST_ON_CUDA,
    )
    yield Implementation(
        op="attention",
        kernel="opmux.plugins.mosaic_gpu.attention:attention",
        supports=attention_config.supports,
        config=attention_config.AttentionConfig,
        default_config=attention_config.default_config,
        priority=_FIRST_ON_CUDA,
    )
    yield Implementation(
        op="attention_vjp",
        kernel="opmux.plugins.mosaic_gpu.attention_vjp:attention_vjp",
        supports=attention_config.supports,
        config=attention_config.AttentionVjpConfig,
        default_config=attention_config.default_vjp_config,
        priority=_FIRST_ON_CUDA,
    )
    yield Implementation(
        op="matmul",
        kernel="opmux.plugins.mosaic_gpu.matmul:matmul",
        supports=matmul_config.supports,
        config=matmul_config.MatmulConfig,
        default_config=matmul_config.default_config,
        priority=_FIRST_ON_CUDA,
    )
    yield Implementation(
        op="matmul_vjp",
        kernel="opmux.plugins.mosaic_gpu.matmul:matmul_vjp",
        supports=matmul_config.supports_vjp,
        config=matmul_config.MatmulConfig,
        default_config=matmul_config.default_vjp_config,
        priority=_FIRST_ON_CUDA,
    )
    yield Implementation(
        op="reduce",
        kernel="opmux.plugins.mosaic_gpu.reduce:reduce",
        supports=reduce_config.supports,
        config=reduce_config.ReduceConfig,
        default_config=reduce_config.default_config,
        priority=_FIRST_ON_CUDA,
    )
    yield Implementation(
        op="chunk_fwd_h",
        kernel="opmux.plugins.mosaic_gpu.chunk_fwd_h:chunk_fwd_h",
        supports=chunk_fwd_h_config.supports,
        config=chunk_fwd_h_config.ChunkFwdHConfig,
        default_config=chunk_fwd_h_config.default_config,
        priority=_FIRST_ON_CUDA,
    )
    yield Implementation(
        op="chunk_fwd_h_vjp",
        kernel="opmux.plugins.mosaic_gpu.chunk_fwd_h_vjp:chunk_fwd_h_vjp",
        supports=chunk_fwd_h_config.supports,
        config=chunk_fwd_h_config.ChunkFwdHConfig,
        default_config=chunk_fwd_h_config.default_config,
        priority=_FIRST_ON_CUDA,
    )
