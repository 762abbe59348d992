"""What the backward kernels of an attention compute alike: weights, and cotangents of scores."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from opmux.plugins.mosaic_tpu import attention_operands as lay
from opmux.plugins.mosaic_tpu.attention_tile import Exponent, Tile


def place_saved(tiling: lay.Tiling, saved: dict[str, jax.Array]) -> dict[str, lay.Placed]:
    """The operands of the backward kernels besides masks."""
    return {
        **{name: lay.queries(tiling, saved[name]) for name in ("query", "d_out")},
        **{name: lay.keys(tiling, saved[name]) for name in ("key", "value")},
        **{name: lay.rows(tiling, saved[name]) for name in ("lse", "delta")},
    }


def weights_and_cotangents(tile: Tile, chunk: int, *, masked: bool, of_products: bool) -> tuple[jax.Array, jax.Array]:
    """Weights, and cotangents of scores, of a chunk of query rows and the block's keys, [kv, chunk] each.

    Args:
      tile: the block.
      chunk: number of the chunk.
      masked: both are 0 for a key that a row does not see, even if the row is NaN.
      of_products: the cotangents are those before the soft cap, but for the scale, rather than of scores with bias.
    """
    refs, rows = tile.refs, tile.rows(chunk)
    exponent = Exponent(tile.tiling.params, "bias" in refs)
    scores, capped = exponent.scores(lay.product(refs["key"][...], refs["query"][:, rows], (1, 0)))
    if "bias" in refs:
        scores = scores + tile.bias(chunk)
    weights = exponent.power(scores - refs["lse"][:, rows])
    d_weights = lay.product(refs["value"][...], refs["d_out"][:, rows], (1, 0))
    d_scores = weights * (d_weights - refs["delta"][:, rows])
    if capped is not None and of_products:
        d_scores = d_scores * (1 - capped * capped)
    if masked:
        seen = tile.seen(chunk, valid_rows=True)
        weights, d_scores = jnp.where(seen, weights, 0), jnp.where(seen, d_scores, 0)
    return weights, d_scores
