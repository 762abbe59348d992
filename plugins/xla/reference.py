"""Kernels of the `xla` backend."""

from __future__ import annotations

from opmux.core.config import Config
from opmux.core.implementation import Kernel
from opmux.core.ops import builtin_ops
from opmux.core.request import Operands, Outputs, Request


def _reference(op: str) -> Kernel:
    reference = builtin_ops()[op].reference

    def kernel(request: Request, operands: Operands, config: Config) -> Outputs:
        return reference(request, operands)

    return kernel


add = _reference("add")
attention = _reference("attention")
chunk_fwd_h = _reference("chunk_fwd_h")
matmul = _reference("matmul")
reduce = _reference("reduce")
