"""The functions of `opmux.registry`, and what they refuse."""

import copy
import inspect
import pickle
import re

import fakes
import jax.numpy as jnp
import numpy as np
import pytest

from opmux import registry
from opmux.core.errors import (
    ArgumentError,
    ArgumentTypeError,
    OpmuxError,
    SettingError,
    UnknownBackendError,
    UnknownOpError,
)


def test_every_public_name_is_there_and_documented():
    for name in registry.__all__:
        assert inspect.getdoc(getattr(registry, name)), name


def test_handles_are_late_bound():
    add = registry.get("add")
    registry.register(fakes.backend("a", 1))
    assert add(0.0, 0.0) == 1
    registry.register(fakes.backend("b", 2, priority={"*": 1}))
    assert add(0.0, 0.0) == 2


def test_get_gives_the_same_handle_for_the_same_question():
    registry.register(fakes.backend("a", 1))
    assert registry.get("add") is registry.get("add")
    assert registry.get("add", backend="a") is registry.get("add", backend="a")
    assert registry.get("add", backend={"add": ["a"]})(0.0, 0.0) == 1
    assert registry.get("add", backend={"add": ["a"]}) is registry.get("add", backend="add=a")
    assert registry.get("add") is not registry.get("add", backend="a")


def test_a_handle_copies_and_pickles():
    registry.register(fakes.backend("a", 1, config=fakes.Blocks))
    registry.register(fakes.backend("b", 2))
    for handle in (registry.get("add", backend="b"), registry.get("add", config=fakes.Blocks(block=8), device="cpu")):
        for copied in (copy.deepcopy({"op": handle})["op"], pickle.loads(pickle.dumps(handle))):
            assert copied(0.0, 0.0) == handle(0.0, 0.0)
            assert copied.explain(0.0, 0.0) == handle.explain(0.0, 0.0)


def test_a_handle_looks_like_the_function():
    attention = registry.get("attention")
    assert attention.__name__ == "attention"
    assert "is_causal" in inspect.signature(attention).parameters
    assert "Raises:" in attention.__doc__
    assert "add" in repr(registry.get("add"))


@pytest.mark.parametrize("op", ["ad", "add_vjp", "", "attention "])
def test_an_op_that_is_not_there(op):
    with pytest.raises(UnknownOpError, match=r"Known: add, attention, chunk_fwd_h, matmul, reduce\."):
        registry.get(op)


@pytest.mark.parametrize("op", [None, 3])
def test_an_op_that_is_no_name(op):
    with pytest.raises(SettingError, match="allowed: the name of an op"):
        registry.get(op)


def test_backends_that_are_not_there():
    registry.register(fakes.backend("mine", 1))
    for call in (
        lambda: registry.get("add", backend="mien"),
        lambda: registry.use(backend="add=mien"),
        lambda: registry.use(prefer=["mien"]),
        lambda: registry.configure(backend={"add": "mien"}),
        lambda: registry.configure(disable=["mien"]),
    ):
        with pytest.raises(UnknownBackendError, match="did you mean 'mine'"):
            call()
    with pytest.raises(UnknownOpError, match="did you mean 'add'"):
        registry.use(backend={"ad": "mine"})


def test_lists_of_names_are_no_strings():
    with pytest.raises(SettingError, match="prefer: got the string 'xla'"):
        registry.use(prefer="xla")
    with pytest.raises(SettingError, match="disable: got the string 'xla'"):
        registry.configure(disable="xla")


def test_listings():
    registry.register(fakes.backend("b", 1))
    registry.register(fakes.backend("a", 1, vjp=fakes.gradient(1.0)))
    assert list(registry.backends()) == ["a", "b"]
    assert [(found.backend, found.op) for found in registry.implementations()] == [
        ("a", "add"), ("a", "add_vjp"), ("b", "add"),
    ]  # fmt: skip
    assert [found.backend for found in registry.implementations("add_vjp")] == ["a"]
    with pytest.raises(UnknownOpError):
        registry.implementations("ad")
    assert registry.failures() == []


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("args", "kwargs", "error", "problem"),
    [
        ((1.0,), {}, ArgumentTypeError, "argument 'y': got nothing"),
        ((1.0, 2.0, 3.0), {}, ArgumentTypeError, "3 positional arguments"),
        ((1.0, 2.0), {"z": 1}, ArgumentTypeError, "argument 'z': got an unknown keyword"),
        ((1.0, 2.0), {"y": 1}, ArgumentTypeError, "argument 'y': got two values"),
        (("a", 1.0), {}, ArgumentTypeError, "argument 'x': got a str"),
        ((1.0, [1.0]), {}, ArgumentTypeError, "argument 'y': got a list"),
        ((jnp.ones(3), jnp.ones(2)), {}, ArgumentError, "argument 'y': got shape"),
    ],
)
def test_bad_arguments_are_named(args, kwargs, error, problem, jit):
    registry.register(fakes.backend("a", 1))
    with pytest.raises(error, match=problem):
        registry.get("add")(*args, **kwargs) if not jit else __import__("jax").jit(
            lambda: registry.get("add")(*args, **kwargs)
        )()


def test_every_error_is_of_one_family():
    from opmux.core import errors

    for name, found in vars(errors).items():
        if inspect.isclass(found) and issubclass(found, Exception) and not issubclass(found, Warning):
            assert issubclass(found, OpmuxError), name
            assert not issubclass(found, NotImplementedError | ImportError), name


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (np.array([object()]), "argument 'y': got dtype object; allowed: a numeric or boolean dtype"),
        (np.array(["text"]), "argument 'y': got dtype <U4"),
        (2**70, "argument 'y': got the integer 1180591620717411303424; allowed: one of at most 32 bits"),
    ],
    ids=["objects", "texts", "huge"],
)
def test_values_that_no_array_holds_are_refused_by_name(bad, words):
    add = registry.get("add")
    for call in (add, lambda x, y: add(x, y=y), add.explain):
        with pytest.raises(ArgumentError, match=re.escape(words)):
            call(jnp.ones(()), bad)
