"""`chunk_fwd_h`: the inter-chunk state pass of gated linear attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from opmux.core import compat
from opmux.core.check import Checker
from opmux.core.op import Call, Cost, Op, make_request
from opmux.core.ops.chunk_index import Offsets, max_rows
from opmux.core.ops.chunk_states import ChunkParams, accumulator, outputs, reference
from opmux.core.request import Outputs, Request

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def canonicalize(
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H"] | None = None,
    g_gamma: Float[Array, " H"] | None = None,
    gk: Float[Array, "B T H K"] | None = None,
    gv: Float[Array, "B T H V"] | None = None,
    h0: Float[Array, "N H K V"] | None = None,
    *,
    output_final_state: bool = False,
    cu_seqlens: Int[Array, " N+1"] | None = None,
    chunk_size: int = 64,
    split_size: int | None = None,
    states_in_fp32: bool = False,
    gates: str = "cumulative",
) -> Any:
    """States between the chunks of gated linear attention.

    For each sequence and head, the state [K, V] follows

        S_t[i, j] = exp(g_t + g_gamma + gk_t[i] + gv_t[j]) * S_{t-1}[i, j] + k_t[i] * v_t[j]

    from `h0`, where all gates are natural logs per token and absent ones count 0; if several are given, all
    of them act. Row c of `h` is the state before token `c * split_size` of its sequence. The state is
    carried in float32 (float64 for float64 inputs) and never rounded between chunks; gates are used in that
    dtype too. A last chunk may be short: padding takes no part, whatever it holds.

    With `gates="cumulative"`, `g`, `gk` and `gv` are running sums over the tokens of a chunk, inclusive,
    that restart at every chunk and at every sequence, and must be finite. With `gates="raw"` they are per
    token, which stays exact for any strength of decay; -inf forgets all that came before. `g_gamma` is per
    token in both.

    Args:
      k: keys, [B, T, H, K]. Note the order: time before heads.
      v: values, [B, T, H, V].
      g: log gate of a head, [B, T, H].
      g_gamma: constant log gate of a head, [H].
      gk: log gates of the key channels, [B, T, H, K].
      gv: log gates of the value channels, [B, T, H, V].
      h0: initial states, [N, H, K, V], where N is the number of sequences; 0 if not given.
      output_final_state: also return the state after the last token of each sequence.
      cu_seqlens: offsets of N sequences packed along T (B is 1), [N + 1], from 0 to T, never decreasing. An
        empty sequence repeats an offset. Concrete offsets are validated and give exact shapes; traced ones
        are taken as they are: tokens past the last offset belong to no sequence.
      chunk_size: tokens of a chunk.
      split_size: tokens between stored states, a multiple of `chunk_size`; `chunk_size` by default.
      states_in_fp32: return `h` in float32 instead of in the dtype of `k`.
      gates: `cumulative` or `raw`.

    Returns:
      A pair `(h, ht)`. `h` is [B, NS, H, K, V] in the dtype of `k`, where NS is ceil(T / split_size), or, of
      packed sequences, the sum of ceil(length / split_size), sequence after sequence; where `cu_seqlens` is
      traced, NS is the bound min(T, (T + N * (split_size - 1)) // split_size), and rows past the sum are 0.
      `ht` is [N, H, K, V], float32 (float64 for float64 inputs), or None without `output_final_state`; of an
      empty sequence it is `h0`.

    Raises:
      ArgumentError: a rank, shape, dtype or value is not allowed.

    The op follows `chunk_fwd_h` of flash-linear-attention (Yang and Zhang), whose gates are base 2 from
    version 0.5.1 on; the chunked form is that of Yang et al., arXiv:2312.06635.
    """
    check = Checker("chunk_fwd_h")
    chunk_size, split_size = _sizes(check, chunk_size, split_size)
    if gates not in ("cumulative", "raw"):
        raise check.error("gates", repr(gates), "'cumulative' or 'raw'")
    output_final_state = check.boolean("output_final_state", output_final_state)
    states_in_fp32 = check.boolean("states_in_fp32", states_in_fp32)
    k, v = check.floating("k", k), check.floating("v", v)
    if k.ndim != 4:
        raise check.error("k", f"shape {k.shape}", "[B, T, H, K]", "A single sequence is a batch of one.")
    B, T, H, K = k.shape
    if v.ndim != 4 or v.shape[:3] != (B, T, H):
        raise check.error("v", f"shape {v.shape}", f"[{B}, {T}, {H}, V] for a k of shape {k.shape}", _layout(T, H))
    V = v.shape[3]
    dtype = k.dtype
    common = jnp.result_type(k, v)
    acc = accumulator(common)
    operands: dict[str, Any] = {"k": k.astype(common), "v": v.astype(common)}

    for name, gate, shape in (
        ("g", g, (B, T, H)), ("g_gamma", g_gamma, (H,)), ("gk", gk, (B, T, H, K)), ("gv", gv, (B, T, H, V)),
    ):  # fmt: skip
        if gate is not None:
            gate = check.floating(name, gate)
            if gate.shape != shape:
                raise check.error(
                    name, f"shape {gate.shape}", f"{list(shape)} for a k of shape {k.shape} and a v of shape {v.shape}",
                    _layout(T, H) if len(shape) > 1 else "",
                )  # fmt: skip
            operands[name] = gate.astype(acc)

    N, num_splits, longest, offsets = B, -(-T // split_size), T, None
    if cu_seqlens is not None:
        offsets, N, num_splits, longest = _packed(check, cu_seqlens, k, split_size)
    if h0 is not None:
        h0 = check.floating("h0", h0)
        if h0.shape != (N, H, K, V):
            raise check.error(
                "h0", f"shape {h0.shape}", f"[N, H, K, V] = {[N, H, K, V]}, where N is the number of sequences",
                "This state is [K, V], not [V, K]." if h0.shape == (N, H, V, K) else "",
            )  # fmt: skip
        operands["h0"] = h0.astype(acc)
    if offsets is not None:
        operands["cu_seqlens"] = offsets

    params = ChunkParams(chunk_size, split_size, num_splits, longest, gates == "raw", states_in_fp32)

    def finish(outputs: Outputs) -> Any:
        h = outputs["h"] if states_in_fp32 else outputs["h"].astype(dtype)
        return h, outputs["ht"] if output_final_state else None

    wanted = ("h", "ht") if output_final_state else ("h",)
    return Call(make_request("chunk_fwd_h", operands, params, wanted), operands, finish)


def prepare(arguments: dict[str, Any]) -> dict[str, Any]:
    """Reads concrete `cu_seqlens`, so that what follows may trace them and still know exact shapes."""
    cu_seqlens = arguments.get("cu_seqlens")
    known = not compat.is_traced(cu_seqlens) and not isinstance(cu_seqlens, Offsets | jax.ShapeDtypeStruct)
    if cu_seqlens is None or not known:
        return arguments
    check = Checker("chunk_fwd_h")
    _, split_size = _sizes(check, arguments.get("chunk_size", 64), arguments.get("split_size"))
    return {**arguments, "cu_seqlens": Offsets.of(check, cu_seqlens, split_size)}


def _sizes(check: Checker, chunk_size: Any, split_size: Any) -> tuple[int, int]:
    split_size = chunk_size if split_size is None else split_size
    for name, size in (("chunk_size", chunk_size), ("split_size", split_size)):
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise check.error(name, f"a {type(size).__name__}", "a positive Python int", type_=True)
        if size < 1:
            raise check.error(name, str(size), "a positive int")
    if split_size % chunk_size:
        raise check.error("split_size", str(split_size), f"a multiple of chunk_size, which is {chunk_size}")
    return int(chunk_size), int(split_size)


def _packed(check: Checker, cu_seqlens: Any, k: jax.Array, split_size: int) -> tuple[jax.Array, int, int, int]:
    """Offsets as an operand, the number of sequences, the number of splits and the longest length."""
    B, T = k.shape[:2]
    if B != 1:
        raise check.error(
            "cu_seqlens", f"offsets for a batch of {B}", "offsets for a batch of one",
            "Packed sequences lie one after another along T; reshape k to [1, B * T, H, K], and the others alike.",
        )  # fmt: skip
    if compat.is_traced(cu_seqlens):
        values = check.integer("cu_seqlens", cu_seqlens)
        if values.ndim != 1 or values.size == 0:
            raise check.error("cu_seqlens", f"shape {values.shape}", "[N + 1] offsets, the first of them 0")
        N = values.size - 1
        return values.astype(jnp.int32), N, max_rows(T, N, split_size), T
    offsets = cu_seqlens if isinstance(cu_seqlens, Offsets) else Offsets.of(check, cu_seqlens, split_size)
    if offsets.total != T:
        raise check.error("cu_seqlens", f"offsets that end at {offsets.total}", f"offsets that end at T, which is {T}")
    values = jnp.asarray(offsets.values)
    return values, values.size - 1, offsets.num_splits, offsets.longest


def _layout(T: int, H: int) -> str:
    note = "The layout is [B, T, H, D]: time before heads."
    return f"{note} T = {T} and H = {H} look like heads before time." if T < H else note


def cost(request: Request) -> Cost:
    """One product of keys and values for each token, and one update of the state for each row."""
    B, T, H, K = request["k"].shape
    V = request["v"].shape[-1]
    specs = outputs(request)
    moved = [spec for _, spec in request.operands] + [specs[name] for name in request.wanted]
    return Cost(flops=2 * H * K * V * (B * T + B * request.params.num_splits), bytes=sum(spec.nbytes for spec in moved))


def batch(request: Request) -> tuple[str, ...]:
    """Packed sequences are one batch element; the gate of each head is shared."""
    return () if "cu_seqlens" in request else tuple(name for name in request if name != "g_gamma")


def _cases() -> Any:
    from opmux.core.cases.chunk_fwd_h import cases

    return cases()


OP = Op(
    name="chunk_fwd_h",
    canonicalize=canonicalize,
    outputs=outputs,
    reference=reference,
    cost=cost,
    static=("output_final_state", "chunk_size", "split_size", "states_in_fp32", "gates"),
    differentiable=("k", "v", "g", "g_gamma", "gk", "gv", "h0"),
    residuals=("h",),
    prepare=prepare,
    batch=batch,
    cases=_cases,
)
