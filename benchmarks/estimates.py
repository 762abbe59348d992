"""What compilers estimate, as the tables of TPU benchmarks print it."""

from __future__ import annotations

import math

from opmux.certify import CompileResult

ANY_SPILLS = {"tpu": 2**20}
"""Allowed spills of workloads that are compared: a kernel that spills is slow, and not wrong."""


def cycles(result: CompileResult) -> float:
    """Estimated cycles of all kernels of a result; infinite if it has none."""
    found = [kernel.figures.get("estimated_cycles", math.inf) for kernel in result.kernels]
    return sum(found) if found else math.inf


def said(cycles: float) -> str:
    """Cycles as a table prints them."""
    return f"{cycles:,.0f}" if cycles < math.inf else "no estimate"


def ratio(ours: float, theirs: float) -> str:
    """Our cycles as a multiple of theirs, where there are both."""
    return f"{ours / theirs:.3f}" if max(ours, theirs) < math.inf else "unknown"
