"""Proof without the device: simulators, deviceless compilers, static measures and reports.

from opmux.certify import certify

report = certify(["mosaic_tpu"], ops=["reduce"], targets=["tpu-v6e"])
assert report.ok, report.failures
"""

from __future__ import annotations

from opmux.certify.compiling import MissingCompilerError
from opmux.certify.functions import FunctionResult, compile_function
from opmux.certify.job import Workload
from opmux.certify.results import CompileResult, Estimate, KernelMeasures, Regression, Report, SimulateResult
from opmux.certify.run import certify, compile
from opmux.certify.targets import TARGETS, Target

__all__ = [
    "TARGETS", "CompileResult", "Estimate", "FunctionResult", "KernelMeasures", "MissingCompilerError", "Regression",
    "Report", "SimulateResult", "Target", "Workload", "certify", "compile", "compile_function",
]  # fmt: skip
