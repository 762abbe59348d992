"""`chunk_fwd_h` by the real compiler, forward and backward, for GPUs that are not there."""

import jax
import jax.numpy as jnp
import pytest

from opmux import registry
from opmux.certify import compiling
from opmux.certify.functions import compile_function

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(compiling.missing("h200")), reason=compiling.missing("h200")),
]

KERNELS = {"chunk_fwd_h", "chunk_fwd_h_vjp", "chunk_fwd_h_tokens"}


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("target", ["h100", "h200"])
@pytest.mark.parametrize(
    ("dtype", "channels", "names", "kernels"),
    [
        (jnp.bfloat16, (128, 128), ("gk",), KERNELS),
        (jnp.float16, (64, 96), ("g", "g_gamma", "gk", "gv"), KERNELS),
        (jnp.bfloat16, (256, 128), (), KERNELS),
        (jnp.float32, (128, 128), ("gk",), {"chunk_fwd_h_sums", "chunk_fwd_h_vjp"}),
    ],
)
def test_nothing_spills(target, dtype, channels, names, kernels):
    B, T, H = 4, 1000, 16
    K, V = channels
    shapes = {"g": (B, T, H), "g_gamma": (H,), "gk": (B, T, H, K), "gv": (B, T, H, V)}

    def loss(k, v, gates):
        h, ht = registry.get("chunk_fwd_h")(k, v, **gates, output_final_state=True)
        return h.astype(jnp.float32).sum() + ht.sum()

    result = compile_function(
        jax.value_and_grad(loss, (0, 1, 2)), spec(B, T, H, K, dtype=dtype), spec(B, T, H, V, dtype=dtype),
        {name: spec(*shapes[name]) for name in names}, target=target,
    )  # fmt: skip
    assert (result.status, result.words) == ("ok", "")
    assert {kernel.kernel for kernel in result.kernels} == kernels
    for kernel in result.kernels:
        spilled = [kernel.figures.get(name, 0) for name in ("spill_store_bytes", "spill_load_bytes", "LDL", "STL")]
        assert not any(spilled), kernel
        assert kernel.figures["tma_stores"] > 0
        assert bool(kernel.figures.get("wgmma")) == (kernel.kernel in ("chunk_fwd_h", "chunk_fwd_h_tokens"))
