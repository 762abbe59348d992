"""Cycle estimates of TPU kernels by XLA's static profile, in a child of their own: it aborts on many patterns.

Each kernel is compiled alone, with its operands as it wants them, since copies and transposes that XLA puts
around it abort the estimator too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opmux.certify import compile_tpu, program, targets
from opmux.certify.attempt import Place
from opmux.certify.job import CompileJob
from opmux.certify.kernels import pallas_calls

IMPOSSIBLE = ("tpu-v4",)
"""Targets whose copies the estimator does not know: it always aborts."""


def profile_job(payload: Mapping[str, Any]) -> dict[str, float]:
    """Estimated cycles by kernel name, for a payload as `attempt.compile_job` takes.

    Kernels whose control flow depends on data have none, nor have two of one name.
    """
    job, scratch = CompileJob.model_validate(payload["job"]), Path(payload["scratch"])
    compile_tpu.start(scratch, profile=True)
    place = Place(targets.target(job.target), scratch)
    found = program.build(job)
    lowered = place.lower(found.function, program.placed(found.arguments, place.sharding))
    calls = list(pallas_calls(lowered.traced.jaxpr))
    cycles: dict[str, float] = {}
    for call in calls:
        if call.data_dependent or [each.name for each in calls].count(call.name) > 1:
            continue
        function, operands = call.alone(place.sharding)
        compile_tpu.clear()
        place.lower(function, *operands).stage.compile()
        cycles[call.name] = compile_tpu.profile(call.name)
    return cycles
