"""`check` on backends that are registered here, of an op that a plugin brings with its oracle."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import Field

from opmux import registry
from opmux.core.cases.case import Case
from opmux.core.config import Config
from opmux.core.errors import UnknownBackendError, UnknownOpError
from opmux.core.implementation import BackendInfo, Implementation, Rejection
from opmux.core.op import Call, Cost, Op, make_request
from opmux.core.request import ArraySpec
from opmux.registry import hookimpl
from opmux.testing import (
    ConformanceError,
    Rejected,
    Subject,
    check,
    check_implementation,
    check_numerics,
    conformance_params,
    find_oracle,
    implemented_ops,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("isolated_registry")


def _canonicalize(x, *, factor=2.0):
    """`x` times a factor."""
    operands = {"x": jnp.asarray(x)}
    return Call(make_request("stretch", operands, factor, ("out",)), operands, lambda outputs: outputs["out"])


def _cases():
    for size in (0, 3, 17):
        yield Case(f"of_{size}", lambda rng, size=size: ((rng.standard_normal(size).astype(np.float32),), {}))
    yield Case("factor", lambda rng: ((rng.standard_normal(5).astype(np.float32),), {"factor": 3.0}), transforms=True)


STRETCH = Op(
    name="stretch",
    canonicalize=_canonicalize,
    outputs=lambda request: {"out": ArraySpec(request["x"].shape, request["x"].dtype)},
    reference=lambda request, operands: {"out": operands["x"] * request.params},
    cost=lambda request: Cost(request["x"].size, 2 * request["x"].nbytes),
    static=("factor",),
    differentiable=("x",),
    cases=_cases,
)


def oracle(x, factor=2.0):
    return np.asarray(x, np.float64) * factor


def kernel(request, operands, config):
    return {"out": operands["x"] * request.params}


class Blocks(Config):
    block: int = Field(default=64, gt=0, multiple_of=8)


def backend(**given):
    """Registers a backend `acme` with one implementation of `stretch`."""
    given = {"kernel": kernel, "forward_mode": True, **given}

    class Plugin:
        opmux_backend = staticmethod(hookimpl(lambda: BackendInfo("acme")))
        opmux_ops = staticmethod(hookimpl(lambda: [STRETCH]))
        opmux_implementations = staticmethod(hookimpl(lambda: [Implementation("stretch", **given)]))

    registry.register(Plugin())
    return given


def failures(*checks, **given):
    """The failed checks of such a backend, by check and case."""
    backend(**given)
    with pytest.raises(ConformanceError) as caught:
        check("acme", oracle=oracle, checks=checks)
    failed = {
        (outcome.check, outcome.case): outcome.detail for outcome in caught.value.outcomes if outcome.state == "failed"
    }
    for detail in failed.values():
        assert detail in str(caught.value)
    return failed


def test_a_good_backend_passes_every_check():
    backend(config=Blocks)
    outcomes = check("acme", oracle=oracle)
    assert {outcome.state for outcome in outcomes} == {"passed"}
    kinds = [outcome.check.partition("/")[0] for outcome in outcomes]
    counted = {kind: kinds.count(kind) for kind in kinds}
    assert counted == {
        "registration": 1, "numerics": 4, "gradients": 4, "transforms": 10, "proof": 1, "sensitivity": 2
    }  # fmt: skip


def test_one_case_of_one_op():
    backend()
    assert [str(outcome) for outcome in check("acme", "stretch", "of_3", oracle=oracle, checks=["numerics"])] == [
        "passed    stretch numerics of_3"
    ]


def test_rejected_cases_keep_the_reasons_of_the_backend():
    def supports(request, device):
        return [Rejection("shape", "17 is a prime")] if request["x"].size == 17 else []

    backend(supports=supports)
    outcomes = check("acme", oracle=oracle, checks=["numerics", "gradients"])
    rejected = [outcome for outcome in outcomes if outcome.state == "rejected"]
    assert {(outcome.check, outcome.case) for outcome in rejected} == {("numerics", "of_17"), ("gradients", "of_17")}
    assert all("shape: 17 is a prime" in outcome.detail for outcome in rejected)
    with pytest.raises(Rejected) as caught:
        check_numerics(Subject.of("stretch", "acme", oracle), list(_cases())[2])
    assert caught.value.reasons[0].code == "shape"


def test_a_backend_that_takes_nothing_fails():
    failed = failures("numerics", supports=lambda request, device: [Rejection("platform", "elsewhere")])
    assert failed["numerics", "*"] == "nothing ran on this backend"


def test_wrong_results_fail_where_they_are_wrong():
    failed = failures(
        "numerics", kernel=lambda request, operands, config: {"out": (operands["x"] * request.params).at[16:].add(1)}
    )
    assert ("numerics", "of_17") in failed
    assert ("numerics", "of_3") not in failed
    assert "the worst is [16]" in failed["numerics", "of_17"]


def test_an_ignored_argument_fails():
    failed = failures("sensitivity", kernel=lambda request, operands, config: {"out": operands["x"] * 2})
    assert "'factor' is ignored" in failed["sensitivity", "factor"]
    assert ("sensitivity", "x") not in failed


def test_a_crash_is_a_failure_and_not_the_end():
    def crash(request, operands, config):
        if request["x"].size == 3:
            raise ZeroDivisionError("three")
        return kernel(request, operands, config)

    failed = failures("numerics", kernel=crash)
    assert failed["numerics", "of_3"] == "ZeroDivisionError: three"
    assert ("numerics", "of_17") not in failed


def test_a_kernel_that_only_runs_alone_fails_its_transforms():
    def alone(request, operands, config):
        shape = jax.ShapeDtypeStruct(request["x"].shape, request["x"].dtype)
        return {"out": jax.pure_callback(lambda x: x * np.float32(request.params), shape, operands["x"])}

    failed = failures("numerics", "transforms", kernel=alone, forward_mode=False)
    assert {"transforms/vmap", "transforms/export"} <= {check for check, _ in failed}
    assert ("numerics", "of_17") not in failed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"supports": lambda request, device: [Rejection("", "why not")]}, "code=''"),
        ({"supports": lambda request, device: [Rejection("shape", "")]}, "detail=''"),
        ({"supports": lambda request, device: jax.devices()[8:]}, "touched a device"),
        ({"supports": lambda request, device: [*range(100_000)][100_000:]}, "supports takes"),
        ({"default_config": lambda request, device: Config()}, "the default config is a"),
        ({"default_config": lambda request, device: Blocks.model_construct(block=7)}, "multiple of 8"),
        ({"kernel": lambda request, operands: operands}, "takes"),
        ({"config": dict}, "no opmux.core.config.Config"),
    ],
)
def test_registrations_that_are_wrong(given, message):
    implementation = dataclasses.replace(
        Implementation("stretch", kernel=kernel, config=Blocks, backend="acme"), **given
    )
    requests = [STRETCH.request(*case.arguments()) for case in _cases()]
    with pytest.raises((AssertionError, ValueError), match=message):
        check_implementation(implementation, requests)


def test_an_impure_predicate_fails():
    answers = iter([[], [Rejection("shape", "now and then")]] * 100)
    implementation = Implementation("stretch", kernel=kernel, supports=lambda request, device: next(answers))
    with pytest.raises(AssertionError, match="not pure"):
        check_implementation(implementation, [STRETCH.request((np.zeros(3, np.float32),), {})])


def test_lax_schemas_fail():
    class Lax(Config, extra="allow"):
        pass

    with pytest.raises(AssertionError, match="unknown fields"):
        check_implementation(Implementation("stretch", kernel=kernel, config=Lax), [])


def test_names_that_mean_nothing():
    backend()
    with pytest.raises(UnknownBackendError, match="acme"):
        check("acmee", oracle=oracle)
    with pytest.raises(UnknownOpError, match="stretch"):
        check("acme", "strech", oracle=oracle)
    with pytest.raises(LookupError, match="oracle="):
        check("acme")
    with pytest.raises(LookupError, match="'stretch'"):
        find_oracle("stretch")


def test_params_for_pytest():
    backend()
    params = conformance_params(["stretch", "add"], ["acme"], oracles={"stretch": oracle})
    assert [param.id for param in params] == [f"stretch-{case.name}-acme" for case in _cases()]
    chosen = conformance_params(
        ["stretch"], ["acme"], oracles={"stretch": oracle}, select=lambda _, case: case.transforms
    )
    assert [param.values[1].name for param in chosen] == ["factor"]
    assert implemented_ops("acme") == ["stretch"]


def test_importing_the_kit_needs_no_pytest():
    program = "import sys; sys.modules['pytest'] = None; import opmux.testing"
    subprocess.run([sys.executable, "-c", program], check=True)
