"""What certification finds: plain records that print, travel as JSON and compare with a baseline."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Status = Literal["ok", "failed", "refused", "aborted", "timeout"]
"""`refused`: the implementation rejects the request by its own `supports`; `aborted`: the child process died."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Estimate(_Record):
    """A roofline estimate. Never a timing: nothing here ran on a device.

    Attributes:
      seconds: the longest of the parts.
      bound: which part that is: `memory`, `compute`, or `schedule` (the compiler's own cycle estimate).
      memory_seconds: bytes over the declared bandwidth.
      compute_seconds: operations over the declared peak of the operands' dtype; 0 where no peak is declared.
      schedule_seconds: estimated cycles over the clock; 0 where the compiler gives none.
    """

    seconds: float
    bound: Literal["memory", "compute", "schedule"]
    memory_seconds: float
    compute_seconds: float
    schedule_seconds: float = 0.0


class KernelMeasures(_Record):
    """Static figures of one compiled kernel, by name, such as `registers`, `spill_store_bytes`, `bundles`.

    Attributes:
      kernel: the kernel's name.
      figures: figures by name; a figure that the compiler does not give is absent.
      warnings: compiler warnings, in its own words.
      files: dumped texts by kind (`ptx`, `sass`, `llo`, `mosaic`), where they were kept.
    """

    kernel: str
    figures: dict[str, float]
    warnings: tuple[str, ...] = ()
    files: dict[str, str] = {}


class CompileResult(_Record):
    """One implementation compiled for one target.

    Attributes:
      words: what the compiler, or the refusing predicate, said.
      kernels: one entry for each kernel in the program.
      hbm_bytes: bytes that cross device memory at least once: operands, results, and twice what is kept between
        kernels. Paddings of the device's layouts are in it.
      lowered: names of custom calls in the lowered text, such as `tpu_custom_call`.
    """

    backend: str
    op: str
    workload: str
    target: str
    status: Status
    words: str = ""
    kernels: tuple[KernelMeasures, ...] = ()
    config: dict[str, object] = {}
    hbm_bytes: float = 0.0
    flops: float = 0.0
    estimate: Estimate | None = None
    lowered: tuple[str, ...] = ()
    seconds: float = 0.0
    cached: bool = False

    @property
    def key(self) -> str:
        """What a baseline files it under."""
        return f"{self.backend}/{self.op}/{self.workload}/{self.target}"


class SimulateResult(_Record):
    """One implementation run on one case in a simulator of its device.

    Attributes:
      mode: the simulator options that matter, such as `dma=eager seed=1`.
      kind: what went wrong: `numerics`, `race`, `out-of-bounds`, `uninitialised`, `barrier`, `hang`, `error`, or
        empty.
      error: largest deviation from the float64 oracle, in units of the tolerance.
    """

    backend: str
    op: str
    case: str
    mode: str
    status: Status
    kind: str = ""
    words: str = ""
    error: float = 0.0
    seconds: float = 0.0

    @property
    def key(self) -> str:
        """A name for the run."""
        return f"{self.backend}/{self.op}/{self.case}/{self.mode}"


class Regression(_Record):
    """A figure that is worse than the committed baseline by more than its tolerance."""

    key: str
    kernel: str
    figure: str
    baseline: float
    found: float
    tolerance: float


class Report(_Record):
    """Everything one certification found.

    Attributes:
      versions: of jax, jaxlib, libtpu, ptxas, Python and opmux.
      skipped: what was not done, and why: a missing compiler with the command that installs it.
    """

    versions: dict[str, str]
    level: Literal["quick", "full"]
    compiled: tuple[CompileResult, ...] = ()
    simulated: tuple[SimulateResult, ...] = ()
    regressions: tuple[Regression, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def failures(self) -> list[CompileResult | SimulateResult]:
        """Results that are neither fine nor refused."""
        return [found for found in (*self.compiled, *self.simulated) if found.status not in ("ok", "refused")]

    @property
    def ok(self) -> bool:
        """Whether nothing failed and nothing got worse."""
        return not self.failures and not self.regressions
