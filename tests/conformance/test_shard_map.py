"""`shard_map` with its default arguments, on the eight devices that every test has."""

from __future__ import annotations

import pytest

from opmux import registry
from opmux.testing import (
    Subject,
    check_shard_map,
    conformance_params,
    expected_rejections,
    find_oracle,
    transform_cases,
)


def _first(subject, case):
    return case.name == transform_cases(subject.op)[0].name


@pytest.mark.parametrize(("subject", "case"), conformance_params(registry.ops(), ["interpret", "xla"], select=_first))
def test_forced(subject, case):
    with expected_rejections():
        check_shard_map(subject, case)


@pytest.mark.parametrize("op", registry.ops())
def test_automatic(op):
    """Where the first choice cannot run under the checks of `shard_map`, the next one does."""
    handle = registry.get(op)
    check_shard_map(Subject(handle.op, handle, find_oracle(op)), transform_cases(handle.op)[0])
