"""A plugin of kernels that compilers take, and of kernels that they refuse, each in its own way."""

from typing import Literal

from opmux.core.config import Config
from opmux.core.implementation import BackendInfo, Implementation, Rejection
from opmux.registry import hookimpl


class ToyConfig(Config):
    what: Literal["plain", "two", "vmem", "spill", "branch", "abort", "hang", "smem", "tma", "wgmma", "trade"] = "plain"


def supports(request, device):
    if request["x"].shape != request["y"].shape:
        return [Rejection("shape", f"x {request['x']} and y {request['y']} differ")]
    return []


@hookimpl
def opmux_backend():
    return BackendInfo(name="toy", platforms=("tpu", "cuda"))


@hookimpl
def opmux_implementations():
    kernel = "certify_toy_kernels:add"
    return [Implementation(op="add", kernel=kernel, supports=supports, config=ToyConfig, priority={"*": 1000})]
