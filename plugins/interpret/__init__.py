"""The `interpret` backend: portable Pallas kernels in interpret mode, on any platform."""

from __future__ import annotations

from collections.abc import Iterable

from opmux.core.implementation import BackendInfo, Implementation
from opmux.plugins.interpret import attention_config, chunk_fwd_h_config, dense_config
from opmux.registry import hookimpl

_FIRST_ON_CPU = {"cpu": 10, "*": -10}


@hookimpl
def opmux_backend() -> BackendInfo:
    """What the backend is."""
    return BackendInfo("interpret", summary="Pallas kernels in interpret mode", tier="interpret")


@hookimpl
def opmux_implementations() -> Iterable[Implementation]:
    """One implementation an op, and backward kernels where the reference's autodiff would cost too much."""
    yield Implementation(
        op="add",
        kernel="opmux.plugins.interpret.add:add",
        supports=dense_config.supports,
        config=dense_config.AddConfig,
        priority=_FIRST_ON_CPU,
    )
    yield Implementation(
        op="matmul",
        kernel="opmux.plugins.interpret.matmul:matmul",
        supports=dense_config.supports,
        config=dense_config.MatmulConfig,
        priority=_FIRST_ON_CPU,
    )
    yield Implementation(
        op="matmul_vjp",
        kernel="opmux.plugins.interpret.matmul:matmul_vjp",
        supports=dense_config.supports,
        config=dense_config.MatmulConfig,
        priority=_FIRST_ON_CPU,
    )
    yield Implementation(
        op="reduce",
        kernel="opmux.plugins.interpret.reduce:reduce",
        supports=dense_config.supports,
        config=dense_config.ReduceConfig,
        priority=_FIRST_ON_CPU,
    )
    yield Implementation(
        op="attention",
        kernel="opmux.plugins.interpret.attention:attention",
        supports=attention_config.supports,
        config=attention_config.AttentionConfig,
        default_config=attention_config.default_config,
        priority=_FIRST_ON_CPU,
        priority_for=attention_config.priority,
    )
    yield Implementation(
        op="attention_vjp",
        kernel="opmux.plugins.interpret.attention_vjp:attention_vjp",
        supports=attention_config.supports,
        config=attention_config.AttentionConfig,
        default_config=attention_config.default_vjp_config,
        priority=_FIRST_ON_CPU,
    )
    yield Implementation(
        op="chunk_fwd_h",
        kernel="opmux.plugins.interpret.chunk_fwd_h:chunk_fwd_h",
        supports=chunk_fwd_h_config.supports,
        config=chunk_fwd_h_config.ChunkFwdHConfig,
        default_config=chunk_fwd_h_config.default_config,
        priority=_FIRST_ON_CPU,
    )
    yield Implementation(
        op="chunk_fwd_h_vjp",
        kernel="opmux.plugins.interpret.chunk_fwd_h_vjp:chunk_fwd_h_vjp",
        supports=chunk_fwd_h_config.supports,
        config=chunk_fwd_h_config.ChunkFwdHVjpConfig,
        default_config=chunk_fwd_h_config.default_vjp_config,
        priority=_FIRST_ON_CPU,
    )
