"""The seam between compiled and simulated products: all ways to give operands, in one kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opmux.core.config import NoConfig
from opmux.core.ops.add import OP
from opmux.core.simulation import SimulatorOptions

SIZE = 64


def kernel(request, operands, config):
    """`out` [5, 64, 64] of `x` and `y` [64, 64]: x y, xT y, x yT, xT yT, and x in registers times y, added to that."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from opmux.plugins.mosaic_gpu.dot import dot, sum_of_dots
    from opmux.plugins.mosaic_gpu.pallas import barriers, launch, swizzled

    def body(x_g, y_g, o_g, x_s, y_s, o_s, full):
        plgpu.copy_gmem_to_smem(x_g, x_s, full.at[0])
        plgpu.copy_gmem_to_smem(y_g, y_s, full.at[0])
        plgpu.barrier_wait(full.at[0])
        steps = []
        products = [
            dot(x_s, y_s),
            dot(x_s, y_s, transpose_a=True),
            dot(x_s, y_s, transpose_b=True, after=lambda: steps.append("after")),
            sum_of_dots(
                3, lambda step: (x_s, y_s), lambda step: None, shape=(SIZE, SIZE), dtype=x_s.dtype,
                transpose_a=True, transpose_b=True,
            ),
        ]  # fmt: skip
        assert steps == ["after"]
        products.append(dot(x_s[...], y_s, products[0]))
        for number, product in enumerate(products):
            o_s[...] = product
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_s, o_g.at[number])
            plgpu.wait_smem_to_gmem(0)

    x, y = operands["x"], operands["y"]
    tile = swizzled((SIZE, SIZE), x.dtype)
    scratch = (tile, tile, swizzled((SIZE, SIZE), jnp.float32), barriers(1, 2))
    out = jax.ShapeDtypeStruct((5, SIZE, SIZE), jnp.float32)
    return {"out": launch(body, out, name="dots", grid=1, scratch=scratch)(x, y)}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)])
def test_products(dtype):
    from opmux.plugins.mosaic_gpu.simulator import simulate

    rng = np.random.default_rng(0)
    x, y = (np.asarray(rng.integers(-8, 8, (SIZE, SIZE)), np.float32).astype(dtype) for _ in range(2))
    call = OP.call((x, y), {})
    got = simulate(kernel, call.request, call.operands, NoConfig(), SimulatorOptions())["out"]
    x, y = (np.asarray(each, np.float64) for each in (x, y))
    want = [x @ y, x.T @ y, x @ y.T, 3 * (x.T @ y.T), 2 * (x @ y)]
    np.testing.assert_array_equal(np.asarray(got), np.stack(want))


def test_it_is_traced_the_same_way_when_compiled():
    x = jnp.zeros((SIZE, SIZE), jnp.bfloat16)
    request = OP.call((x, x), {}).request
    text = str(jax.make_jaxpr(lambda x, y: kernel(request, {"x": x, "y": y}, NoConfig())["out"])(x, x))
    assert text.count("wgmma_ref") == 5
    assert "dot_general" not in text
