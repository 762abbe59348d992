"""The `mosaic_tpu` backend: Pallas kernels compiled by Mosaic for TPU v4 to v7x."""

from __future__ import annotations

from collections.abc import Iterable

from opmux.core.implementation import BackendInfo, Implementation
from opmux.plugins.mosaic_tpu import dense_config
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
    """One implementation an op; backwards are the autodiff of the reference, which XLA fuses."""
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
