"""A whole encoder compiled for a TPU and for a GPU that are not there."""

import importlib

import jax
import jax.numpy as jnp
import pytest

from opmux import registry
from opmux.certify import compiling
from opmux.certify.functions import compile_function
from opmux.cli.minilm.encoder import Layer, Linear, Norm, Params, encode

VOCABULARY, POSITIONS, LAYERS, FEATURES, HIDDEN = 30522, 512, 6, 384, 1536


def parameters():
    """The weights of all-MiniLM-L6-v2 without their values."""

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def linear(inputs, outputs):
        return Linear(array(LAYERS, inputs, outputs), array(LAYERS, outputs))

    def norm():
        return Norm(array(LAYERS, FEATURES), array(LAYERS, FEATURES))

    square = linear(FEATURES, FEATURES)
    layers = Layer(
        square, square, square, square, norm(), linear(FEATURES, HIDDEN), linear(HIDDEN, FEATURES), norm()
    )  # fmt: skip
    embeddings = (array(size, FEATURES) for size in (VOCABULARY, POSITIONS, 2))
    return Params(*embeddings, Norm(array(FEATURES), array(FEATURES)), layers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "backend", "call"),
    [("tpu-v6e", "mosaic_tpu", "tpu_custom_call"), ("h200", "mosaic_gpu", "mosaic_gpu_v2")],
)
@pytest.mark.filterwarnings("ignore::opmux.core.errors.SlowPathWarning")
def test_minilm(isolated_registry, target, backend, call):
    if lacks := compiling.missing(target):
        pytest.skip(lacks)
    if backend not in registry.backends():
        registry.register(importlib.import_module(f"opmux.plugins.{backend}"))
    ids = jax.ShapeDtypeStruct((2, 32), jnp.int32)
    found = compile_function(encode, parameters(), ids, ids, ids, target=target)
    assert (found.status, found.words) == ("ok", "")
    assert set(found.backends) == {"add", "matmul", "reduce", "attention"}
    assert backend in found.backends["add"]
    assert found.custom_calls == (call,)
    assert found.kernels
    weights = sum(leaf.size * 4 for leaf in jax.tree.leaves(parameters()))
    assert found.memory["arguments"] >= weights
    assert found.memory["results"] >= 2 * FEATURES * 4
