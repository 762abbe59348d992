"""`chunk_fwd_h` beyond the cases of the conformance kit: golden values, blocks, offsets."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from opmux import registry
from opmux.core.cases.chunk_fwd_h import chunk_local_cumsum, golden
from opmux.core.devices import device
from opmux.core.op import backward_request
from opmux.core.ops.chunk_fwd_h import OP
from opmux.core.ops.chunk_index import max_rows, row_table
from opmux.plugins.interpret.chunk_fwd_h import chunk_fwd_h as interpreted
from opmux.plugins.interpret.chunk_fwd_h_config import (
    STEP_BYTES,
    ChunkFwdHConfig,
    ChunkFwdHVjpConfig,
    default_config,
)
from opmux.plugins.interpret.chunk_fwd_h_vjp import chunk_fwd_h_vjp as interpreted_vjp
from opmux.testing.oracle.chunk_fwd_h import chunk_fwd_h as oracle
from opmux.testing.subject import quick_jit

BACKENDS = ("interpret", "xla")

# sum(h), h[0,1,0,0,0], h[0,2,1,3,2], sum(ht), ht[0,0,0,0], ht[0,1,3,2]; from an independent implementation.
GOLDEN = {
    (): (43.727281443536, 7.954772409027, 0.141878907342, 15.008243785079, 3.702925612476, -1.254358582697),
    ("g",): (13.080164581399, 5.975401037614, 0.292542074961, -3.147311667936, -1.586606350037, -1.078723963922),
    ("g_gamma",): (25.751050528680, 6.425297945305, 0.284723698370, 2.417273131719, -0.286908733611, -1.111489642555),
    ("gk",): (16.193071554177, 5.712355555159, 0.445540034811, -1.938400471813, -1.265942084188, -1.014207304709),
    ("gv",): (21.582336482247, 6.458129461987, 0.443207080454, 0.522711293690, -0.277606690928, -0.935179542070),
    ("g", "gk"): (5.471000021950, 4.540585852845, 0.439109128644, -4.414303635615, -2.212857506879, -1.007726312907),
}  # fmt: skip


def run(which: str) -> Any:
    return oracle if which == "oracle" else registry.get("chunk_fwd_h", backend=which)


def random(seed: int, B: int, T: int, H: int, K: int, V: int, gates: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"g": (B, T, H), "g_gamma": (H,), "gk": (B, T, H, K), "gv": (B, T, H, V)}
    arrays = {"k": rng.standard_normal((B, T, H, K)), "v": rng.standard_normal((B, T, H, V))}
    arrays |= {name: -0.2 * rng.random(shapes[name]) for name in gates}
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def assert_near(got: Any, want: Any, rtol: float = 5e-6) -> None:
    scale = max(float(np.abs(want).max(initial=0)), 1e-30)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=rtol * scale)


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "cumulative"])
@pytest.mark.parametrize("gates", GOLDEN, ids="_".join)
@pytest.mark.parametrize("which", ["oracle", *BACKENDS])
def test_golden_values(which, gates, raw):
    args, kwargs = golden(gates, raw=raw)(np.random.default_rng(0))
    h, ht = (np.asarray(array, np.float64) for array in run(which)(*args, **kwargs))
    got = (h.sum(), h[0, 1, 0, 0, 0], h[0, 2, 1, 3, 2], ht.sum(), ht[0, 0, 0, 0], ht[0, 1, 3, 2])
    # The inputs are the formulas rounded to float32, and sums run over 72 terms of up to 8.
    np.testing.assert_allclose(got, GOLDEN[gates], rtol=0, atol=3e-5)


@pytest.mark.parametrize("which", ["oracle", *BACKENDS])
def test_golden_values_of_packed_sequences(which):
    args, kwargs = golden(("gk",), [0, 5, 5, 37])(np.random.default_rng(0))
    h, ht = (np.asarray(array) for array in run(which)(*args, **kwargs))
    assert h.shape == (1, 3, 2, 4, 3)
    got = (h.sum(dtype=np.float64), h[0, 1, 0, 0, 0], h[0, 2, 1, 3, 2], ht.sum(dtype=np.float64), ht[2, 0, 0, 0])
    want = (2.776984228258, 0.070560004030, -0.216724961556, 10.167419565142, -1.929449647076)
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-5)
    np.testing.assert_array_equal(ht[1], kwargs["h0"][1])


# Three blocks and a tail along batch, heads, channels and splits; the last split is short too.
BLOCKS = {
    "dense": {"B": 7, "T": 51, "chunk_size": 8},
    "dense_full_splits": {"B": 4, "T": 48, "chunk_size": 8},
    "split": {"B": 3, "T": 115, "chunk_size": 8, "split_size": 16},
    "packed": {"B": 1, "T": 60, "chunk_size": 8, "cu_seqlens": (0, 0, 20, 21, 21, 44, 60, 60)},
}  # fmt: skip


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "cumulative"])
@pytest.mark.parametrize("sizes", BLOCKS.values(), ids=BLOCKS)
def test_many_blocks_forward_and_backward(sizes, raw):
    sizes = dict(sizes)
    arrays = random(3, sizes.pop("B"), sizes.pop("T"), 7, 7, 8, ("g", "g_gamma", "gk", "gv"))
    cu_seqlens = sizes.get("cu_seqlens")
    if not raw:
        for name in ("g", "gk", "gv"):
            arrays[name] = chunk_local_cumsum(arrays[name], sizes["chunk_size"], cu_seqlens).astype(np.float32)
    N = arrays["k"].shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    arrays["h0"] = np.random.default_rng(4).standard_normal((N, 7, 7, 8)).astype(np.float32)
    options = {**sizes, "gates": "raw" if raw else "cumulative", "output_final_state": True}
    call = OP.call((), {**arrays, **options})
    operands = dict(call.operands)

    config = ChunkFwdHConfig(block_batch=2, block_heads=2, block_splits=2, block_k=2, block_v=3)
    outputs = quick_jit(lambda operands: interpreted(call.request, operands, config))(operands)
    want_h, want_ht = oracle(**arrays, **options)
    assert_near(outputs["h"], want_h)
    assert_near(outputs["ht"], want_ht)

    rng = np.random.default_rng(5)
    operands["h"] = outputs["h"]
    operands |= {f"d_{n}": rng.standard_normal(outputs[n].shape).astype(np.float32) for n in ("h", "ht")}
    request = backward_request(OP, call.request)
    narrow = ChunkFwdHVjpConfig(block_batch=2, block_heads=2, block_splits=2)
    got = quick_jit(lambda operands: interpreted_vjp(request, operands, narrow))(operands)
    want = quick_jit(lambda operands: OP.vjp.reference(request, operands))(operands)
    assert set(got) == set(want) == {"k", "v", "g", "g_gamma", "gk", "gv", "h0"}
    for name, cotangent in want.items():
        assert_near(got[name], cotangent, 2e-5)


def test_the_default_blocks_stay_within_their_budget():
    struct = jax.ShapeDtypeStruct((8, 65536, 16, 128), jnp.float32)
    request = OP.request((struct, struct), {})
    config = default_config(request, device("cpu"))
    tokens = config.block_batch * config.block_heads * config.block_splits * 64
    assert tokens * 2 * (128 + 128) * 4 <= STEP_BYTES


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("split", [8, 24])
def test_traced_offsets_give_the_same_rows_and_zeros_after_them(backend, split):
    arrays = random(0, 1, 60, 2, 3, 4, ("gk", "g"))
    op = registry.get("chunk_fwd_h", backend=backend)
    options = {"chunk_size": 8, "split_size": split, "gates": "raw", "output_final_state": True}
    traced = jax.jit(lambda cu_seqlens: op(**arrays, cu_seqlens=cu_seqlens, **options))
    for cu_seqlens in ([0, 20, 21, 37, 60], [0, 0, 60, 60, 60], [0, 7, 14, 22, 60]):
        cu_seqlens = np.asarray(cu_seqlens, np.int32)
        h, ht = traced(cu_seqlens)
        want_h, want_ht = oracle(**arrays, cu_seqlens=cu_seqlens, **options)
        rows = want_h.shape[1]
        assert h.shape[1] == (60 + 4 * (split - 1)) // split >= rows
        assert_near(h[:, :rows], want_h)
        assert not np.asarray(h[:, rows:]).any()
        assert_near(ht, want_ht)


@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap_over_offsets(backend):
    arrays = random(1, 1, 24, 2, 3, 4, ("gk",))
    many = np.asarray([[0, 3, 24], [0, 24, 24], [0, 0, 24]], np.int32)
    op = registry.get("chunk_fwd_h", backend=backend)
    options = {"chunk_size": 8, "gates": "raw", "output_final_state": True}
    _, ht = jax.vmap(lambda cu_seqlens: op(**arrays, cu_seqlens=cu_seqlens, **options))(many)
    for number, cu_seqlens in enumerate(many):
        assert_near(ht[number], oracle(**arrays, cu_seqlens=cu_seqlens, **options)[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_past_traced_offsets_matter_to_nothing(backend):
    arrays = random(2, 1, 40, 2, 3, 4, ("gk",))
    inside = {name: array[:, :29] for name, array in arrays.items()}
    for array in arrays.values():
        array[:, 29:] = np.nan
    op = registry.get("chunk_fwd_h", backend=backend)
    options = {"chunk_size": 8, "gates": "raw", "output_final_state": True}

    @jax.jit
    def run(arrays, cu_seqlens):
        def loss(arrays):
            h, ht = op(**arrays, cu_seqlens=cu_seqlens, **options)
            return h.sum() + (ht * ht).sum(), ht

        return jax.grad(loss, has_aux=True)(arrays)

    gradients, ht = run(arrays, np.asarray([0, 12, 29], np.int32))
    assert_near(ht, oracle(**inside, cu_seqlens=[0, 12, 29], **options)[1])
    for gradient in gradients.values():
        assert np.isfinite(gradient).all()
        assert np.asarray(gradient[:, :28]).any()
        assert not np.asarray(gradient[:, 29:]).any()


def test_concrete_offsets_of_equal_sizes_share_a_compiled_function():
    first, second, third = (
        OP.prepare({"cu_seqlens": np.asarray(cu_seqlens), "chunk_size": 16})["cu_seqlens"]
        for cu_seqlens in ([0, 20, 60], [0, 25, 60], [0, 16, 60])
    )
    assert jax.tree.structure(first) == jax.tree.structure(second) != jax.tree.structure(third)


@pytest.mark.parametrize("make", [tuple, list, lambda offsets: np.asarray(offsets, np.uint8), jnp.asarray])
def test_offsets_may_be_any_integers(make):
    arrays = random(0, 1, 37, 2, 3, 4)
    h, _ = registry.get("chunk_fwd_h")(**arrays, cu_seqlens=make([0, 5, 37]), chunk_size=16)
    assert_near(h, oracle(**arrays, cu_seqlens=[0, 5, 37], chunk_size=16)[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gate_of_minus_infinity_forgets_exactly(backend):
    """The states after a reset are those of a sequence that starts there, to the last bit."""
    arrays = random(6, 1, 48, 2, 3, 4, ("g", "gk"))
    arrays["g"][:, 21] = -np.inf
    op = registry.get("chunk_fwd_h", backend=backend)
    options = {"chunk_size": 16, "gates": "raw", "output_final_state": True}
    before = {name: array.copy() for name, array in arrays.items()}
    before["k"][:, :21] = 0
    h, ht = op(**arrays, **options)
    other_h, other_ht = op(**before, **options)
    np.testing.assert_array_equal(h[:, 2:], other_h[:, 2:])
    np.testing.assert_array_equal(ht, other_ht)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_stay_finite_through_a_reset(backend):
    arrays = random(7, 1, 40, 2, 3, 4, ("g", "gk", "gv"))
    arrays["gk"][:, 21, 0, 1] = -np.inf
    op = registry.get("chunk_fwd_h", backend=backend)
    gradients = jax.grad(lambda a: op(**a, chunk_size=16, gates="raw")[0].sum())(arrays)
    for gradient in gradients.values():
        assert np.isfinite(gradient).all()
    assert gradients["gk"][0, 21, 0, 1] == 0


def test_dtypes_of_the_results():
    arrays = {name: array.astype(jnp.bfloat16) for name, array in random(0, 1, 9, 1, 2, 3).items()}
    op = registry.get("chunk_fwd_h")
    h, ht = op(**arrays, chunk_size=4, output_final_state=True)
    assert (h.dtype, ht.dtype) == (jnp.bfloat16, jnp.float32)
    assert op(**arrays, chunk_size=4, states_in_fp32=True)[0].dtype == jnp.float32
    assert op(**arrays, chunk_size=4)[1] is None
    wide = op(arrays["k"], arrays["v"].astype(jnp.float32), chunk_size=4)[0]
    assert wide.dtype == jnp.bfloat16


@pytest.mark.parametrize("size", [1, 5, 16])
def test_rows_of_packed_sequences(size):
    rng = np.random.default_rng(size)
    for _ in range(6):
        lengths = rng.integers(0, 40, size=(count := rng.integers(1, 9))) * (rng.random(count) < 0.7)
        edges = np.concatenate([[0], np.cumsum(lengths)])
        want = [
            (n, start, min(size, end - start))
            for n, (begin, end) in enumerate(pairwise(edges))
            for start in range(begin, end, size)
        ]
        places = max_rows(int(edges[-1]), len(lengths), size)
        table = row_table(jnp.asarray(edges, jnp.int32), size, places)
        got = list(zip(*(np.asarray(part).tolist() for part in table[:3]), strict=True))
        assert got[: len(want)] == want
        assert not any(length for _, _, length in got[len(want) :])
        assert table.first_row[-1] == len(want) <= places


def test_shard_map_checks_are_named_as_the_reason():
    arrays = random(0, 1, 9, 1, 2, 3)
    mesh = jax.make_mesh((1,), ("x",))
    placed = jax.device_put(arrays, NamedSharding(mesh, P("x")))
    found = []

    def inside(k, v):
        found.append(registry.explain("chunk_fwd_h", k, v, chunk_size=4))
        return registry.get("chunk_fwd_h")(k, v, chunk_size=4)[0]

    h = jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(placed["k"], placed["v"])
    assert_near(h, oracle(**arrays, chunk_size=4)[0])
    assert found[0].backend == "xla"
    assert [reason.code for reason in found[0].candidate("interpret").reasons] == ["shard_map"]
