"""Through the registry: forced on a CPU, kernels are simulated under every transform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opmux import registry

pytestmark = pytest.mark.filterwarnings("ignore::opmux.core.errors.SimulatedBackendWarning")

X = np.linspace(-1, 1, 3 * 40, dtype=np.float32).reshape(3, 40)


def test_it_is_simulated_when_forced_and_never_chosen_here():
    decision = registry.get("reduce", backend="mosaic_gpu").explain(X)
    assert (decision.backend, decision.simulated) == ("mosaic_gpu", True)
    assert registry.explain("reduce", X).backend != "mosaic_gpu"


@pytest.mark.parametrize("device", ["h100", "h200", "b200"])
def test_it_is_chosen_on_its_devices(device):
    with registry.use(device=device):
        for op, args in (("add", (X, X)), ("reduce", (X,))):
            assert registry.explain(op, *args).backend == "mosaic_gpu"
    with registry.use(device="a100"):
        assert registry.explain("add", X, X).backend == "xla"


def test_gradients_and_vmap():
    add, reduce = (registry.get(op, backend="mosaic_gpu") for op in ("add", "reduce"))

    def loss(x, y):
        return jnp.sum(reduce(add(x, y), kind="max", axis=-1) ** 2)

    got = jax.jit(jax.value_and_grad(loss, (0, 1)))(X, X[:, :1])

    def plain(x, y):
        return jnp.sum(jnp.max(x + y, -1) ** 2)

    want = jax.value_and_grad(plain, (0, 1))(X, X[:, :1])
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6), got, want)
    batched = jax.vmap(lambda row: reduce(row, kind="mean"))(X)
    np.testing.assert_allclose(batched, X.mean(-1), atol=1e-6)


@pytest.mark.slow
def test_scan_and_remat():
    add = registry.get("add", backend="mosaic_gpu")

    @jax.checkpoint
    def step(total, row):
        total = add(total, row) * 2.0
        return total, total

    def run(rows):
        return jnp.sum(jax.lax.scan(step, jnp.zeros(40), rows)[1])

    weights = (jnp.arange(3) - 2).astype(np.float32)
    want = 2.0 + 4.0 * (2.0**-weights - 1.0)
    np.testing.assert_allclose(jax.grad(run)(X), np.broadcast_to(want[:, None], X.shape), rtol=1e-6)
