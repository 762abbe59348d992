"""What `chunk_fwd_h` computes on canonical operands: parameters, outputs and the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from opmux.core.ops.chunk_gates import Exponents, decayed, exponents
from opmux.core.ops.chunk_index import RowTable, gather_rows, row_table
from opmux.core.request import ArraySpec, Operands, Outputs, Request

GATES = ("g", "g_gamma", "gk", "gv")


@dataclass(frozen=True, slots=True)
class ChunkParams:
    """Static parameters of a canonical `chunk_fwd_h`.

    Attributes:
      chunk_size: tokens over which cumulative gates run before they restart.
      split_size: tokens between stored states; a multiple of `chunk_size`.
      num_splits: states to store, a row of output `h` each: exact, or an upper bound where the offsets of
        packed sequences are traced.
      longest: no sequence is longer, or it is at least `split_size`.
      raw: gates are per token instead of chunk-local running sums.
      states_in_fp32: states are stored as they are carried instead of in the dtype of `k`.
    """

    chunk_size: int
    split_size: int
    num_splits: int
    longest: int
    raw: bool = False
    states_in_fp32: bool = False

    @property
    def chunk(self) -> int:
        """Chunk size that does the same work without tokens that no sequence has."""
        return max(1, min(self.chunk_size, self.longest))

    @property
    def span(self) -> int:
        """Tokens of a split likewise; a multiple of `chunk`."""
        return min(self.split_size, -(-self.longest // self.chunk) * self.chunk) if self.longest else 1


def accumulator(dtype: Any) -> np.dtype[Any]:
    """Float64 for float64 inputs, else float32."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def sequences(request: Request) -> int:
    """Number of sequences."""
    return request["cu_seqlens"].size - 1 if "cu_seqlens" in request else request["k"].shape[0]


def outputs(request: Request) -> dict[str, ArraySpec]:
    """`h` [B, NS, H, K, V] in the dtype of `k` or the accumulator's; `ht` [N, H, K, V] in the accumulator's."""
    params: ChunkParams = request.params
    B, _, H, K = request["k"].shape
    V = request["v"].shape[-1]
    acc = accumulator(request["k"].dtype)
    return {
        "h": ArraySpec((B, params.num_splits, H, K, V), acc if params.states_in_fp32 else request["k"].dtype),
        "ht": ArraySpec((sequences(request), H, K, V), acc),
    }


def without_tokens(request: Request, operands: Operands) -> Outputs | None:
    """The outputs where there is no token or no state to compute, else None."""
    specs = outputs(request)
    h, ht = (jnp.zeros(specs[name].shape, specs[name].dtype) for name in ("h", "ht"))
    if h.size:
        return None
    return {"h": h, "ht": operands.get("h0", ht)}


@dataclass(frozen=True, slots=True)
class Rows:
    """The tokens of a request cut into rows of `params.span` tokens, one for each stored state.

    Attributes:
      arrays: `k`, `v` and the gates by name, [B, R, span, H, ...]; `g_gamma` as it is.
      lengths: valid tokens of each row, [B, R].
      table: where the rows of packed sequences lie.
      full: every row is known to be full.
    """

    arrays: dict[str, jax.Array]
    lengths: jax.Array
    table: RowTable | None
    full: bool


def cut_rows(request: Request, operands: Operands) -> Rows:
    """Cuts the tokens of a request into rows; padding is 0."""
    params: ChunkParams = request.params
    B, T = request["k"].shape[:2]
    R, span = params.num_splits, params.span
    arrays = {name: operands[name] for name in ("k", "v", *GATES) if name in operands}
    if "cu_seqlens" in operands:
        table = row_table(operands["cu_seqlens"], params.split_size, R)
        rows = {n: a if n == "g_gamma" else gather_rows(a, table, span) for n, a in arrays.items()}
        return Rows(rows, table.length[None], table, False)
    pad_to = R * span - T

    def cut(array: jax.Array) -> jax.Array:
        padded = jnp.pad(array, ((0, 0), (0, pad_to), *((0, 0),) * (array.ndim - 2))) if pad_to else array
        return padded.reshape(B, R, span, *array.shape[2:])

    rows = {n: a if n == "g_gamma" else cut(a) for n, a in arrays.items()}
    lengths = jnp.minimum(span, T - span * jnp.arange(R, dtype=jnp.int32))
    return Rows(rows, jnp.broadcast_to(lengths, (B, R)), None, pad_to == 0)


def reference(request: Request, operands: Operands) -> Outputs:
    """The specification: what each row of tokens adds to the state at once, then the states one by one."""
    trivial = without_tokens(request, operands)
    if trivial is not None:
        return trivial
    params: ChunkParams = request.params
    specs = outputs(request)
    acc = specs["ht"].dtype
    rows = cut_rows(request, operands)
    decay = exponents(
        {n: a for n, a in rows.arrays.items() if n in GATES},
        rows.lengths, params.span, params.chunk, params.raw, rows.full,
    )  # fmt: skip

    # [R, B, H, K, V]: rows lead, since the states are computed along them.
    k = decayed(rows.arrays["k"].astype(acc), decay.k)
    v = decayed(rows.arrays["v"].astype(acc), decay.v)
    added = lax.dot_general(k, v, (((2,), (2,)), ((1, 0, 3), (1, 0, 3))), precision=lax.Precision.HIGHEST)
    h0 = operands.get("h0", jnp.zeros((1, *specs["ht"].shape[1:]), acc))
    h, ht = _states(added, decay, jnp.broadcast_to(h0, specs["ht"].shape), rows.table)
    return {"h": jnp.moveaxis(h, 0, 1).astype(specs["h"].dtype), "ht": ht}


def _states(added: jax.Array, decay: Exponents, h0: jax.Array, table: RowTable | None) -> tuple[jax.Array, jax.Array]:
    """The state before each row [R, B, H, K, V], and after each sequence [N, H, K, V]."""
    factors = [jnp.exp(jnp.moveaxis(e, 1, 0)) for e in (decay.state_k, decay.state_v) if e is not None]

    def advance(state: jax.Array, factors: list[jax.Array], added: jax.Array) -> jax.Array:
        for factor in factors:
            state = state * factor
        return state + added

    if table is None:
        start = _varying_like(h0, [*factors, added])
        ht, h = lax.scan(lambda state, row: (advance(state, *row), state), start, (factors, added))
        return h, ht

    row = jnp.arange(table.sequence.shape[0], dtype=jnp.int32)
    opens = row == table.first_row[table.sequence]

    def step(state: jax.Array, row: Any) -> tuple[jax.Array, jax.Array]:
        opens, initial, factors, added = row
        state = jnp.where(opens, initial, state)
        return advance(state, factors, added), state

    initial = h0[table.sequence]
    start = _varying_like(jnp.zeros_like(added[0]), [*factors, added, initial, opens])
    _, h = lax.scan(step, start, (opens, initial, factors, added))
    last = table.first_row[1:] - 1
    final = advance(h[last, 0], [factor[last, 0] for factor in factors], added[last, 0])
    empty = (table.first_row[1:] == table.first_row[:-1])[:, None, None, None]
    used = (table.length > 0)[:, None, None, None, None]
    return jnp.where(used, h, 0), jnp.where(empty, h0, final)


def _varying_like(state: jax.Array, rows: list[jax.Array]) -> jax.Array:
    """The state, as one that varies over a mesh wherever the rows do: `shard_map` asks that of a carry."""
    for row in rows:
        state = jnp.where(True, state, row[0])
    return state
