"""Derivatives of ops whose kernels have a rule for reverse mode only, and of those that JAX differentiates itself."""

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from opmux import registry
from opmux.core.errors import DifferentiationError, ForcedBackendError


def opaque_matmul(request, operands, config):
    """A kernel that JAX cannot differentiate, as a Pallas one."""
    out = jax.eval_shape(jnp.matmul, operands["a"], operands["b"])
    return {"out": jax.pure_callback(lambda a, b: np.matmul(a, b), out, operands["a"], operands["b"],
                                     vmap_method="sequential")}  # fmt: skip


@pytest.fixture(autouse=True)
def backends():
    registry.register(fakes.plugin("reverse", registry.Implementation("matmul", opaque_matmul, priority={"*": 9})))
    registry.register(
        fakes.plugin(
            "able",
            registry.Implementation(
                "matmul", lambda request, given, config: {"out": jnp.matmul(given["a"], given["b"])}, forward_mode=True
            ),
        )
    )


A = jnp.asarray(np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4))
B = jnp.asarray(np.linspace(2, -1, 8, dtype=np.float32).reshape(4, 2))


def f(a, backend=None):
    return registry.get("matmul", backend=backend)(a, B)


def loss(a):
    return (f(a) ** 3).sum()


def truth(a):
    return ((a @ B) ** 3).sum()


FORWARD = {
    "jvp": lambda: jax.jvp(f, (A,), (A,)),
    "jacfwd": lambda: jax.jacfwd(f)(A),
    "linearize": lambda: jax.linearize(f, A)[1](A),
    "hessian": lambda: jax.hessian(loss)(A),
    "jit(jvp)": lambda: jax.jit(lambda a: jax.jvp(f, (a,), (a,)))(A),
    "jit(jacfwd)": lambda: jax.jit(jax.jacfwd(f))(A),
    "jit(hessian)": lambda: jax.jit(jax.hessian(loss))(A),
    "jvp(jit)": lambda: jax.jvp(jax.jit(f), (A,), (A,)),
    "jvp(vmap)": lambda: jax.jvp(jax.vmap(f), (A[None],), (A[None],)),
    "vmap(jvp)": lambda: jax.vmap(lambda a: jax.jvp(f, (a,), (a,)))(A[None]),
    "jit(vmap(jvp))": lambda: jax.jit(jax.vmap(lambda a: jax.jvp(f, (a,), (a,))))(A[None]),
    "jvp(scan)": lambda: jax.jvp(lambda a: lax.scan(lambda c, _: (c, f(c)), a, None, length=2)[1], (A,), (A,)),
    "jvp(grad) by what follows": lambda: jax.jvp(
        lambda w: jax.grad(lambda a: w * f(a).sum())(A), (1.0,), (1.0,)
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", FORWARD)
def test_T3_forward_mode_names_a_backend_that_can(how):
    with pytest.raises(DifferentiationError) as caught:
        jax.block_until_ready(FORWARD[how]())
    text = str(caught.value)
    assert "matmul: forward-mode" in text
    assert "backend 'reverse' has a rule for reverse mode only" in text
    assert 'registry.get("matmul", backend="able")' in text
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("how", [name for name in FORWARD if name != "jvp(grad) by what follows"])
def test_the_backend_that_was_named_can(how):
    with registry.use(backend="able"):
        jax.block_until_ready(FORWARD[how]())


def test_forward_mode_with_no_way_out():
    registry.unregister("able")
    with pytest.raises(DifferentiationError, match="no backend has one"):
        jax.jvp(f, (A,), (A,))


REVERSE = {
    "grad": (lambda loss: jax.grad(loss)),
    "jit(grad)": (lambda loss: jax.jit(jax.grad(loss))),
    "grad(jit)": (lambda loss: jax.grad(jax.jit(loss))),
    "vjp": (lambda loss: lambda a: jax.vjp(loss, a)[1](1.0)[0]),
    "vmap(grad)": (lambda loss: lambda a: jax.vmap(jax.grad(loss))(a[None])[0]),
    "jit(vmap(grad))": (lambda loss: lambda a: jax.jit(jax.vmap(jax.grad(loss)))(a[None])[0]),
    "grad(vmap)": (lambda loss: lambda a: jax.grad(lambda a: jax.vmap(loss)(a).sum())(a[None])[0]),
    "grad(remat)": (lambda loss: jax.grad(jax.checkpoint(loss))),
    "vmap(grad(remat))": (lambda loss: lambda a: jax.vmap(jax.grad(jax.checkpoint(loss)))(a[None])[0]),
    "jit(vmap(grad(remat(jit))))": (
        lambda loss: lambda a: jax.jit(jax.vmap(jax.grad(jax.checkpoint(jax.jit(loss)))))(a[None])[0]
    ),
    "grad(scan)": (
        lambda loss: jax.grad(lambda a: lax.scan(lambda c, _: (c * 1.5, loss(c)), a, None, length=2)[1].sum())
    ),
    "grad(scan(remat))": (
        lambda loss: jax.grad(
            lambda a: lax.scan(lambda c, _: (c * 1.5, jax.checkpoint(loss)(c)), a, None, length=2)[1].sum()
        )
    ),
    "vmap(grad(scan))": (
        lambda loss: lambda a: jax.vmap(
            jax.grad(lambda a: lax.scan(lambda c, _: (c * 1.5, loss(c)), a, None, length=2)[1].sum())
        )(a[None])[0]
    ),
    "grad(cond)": (lambda loss: jax.grad(lambda a: lax.cond(a[0, 0] < 0, loss, lambda a: 0.0, a))),
    "jacrev": (lambda loss: jax.jacrev(loss)),
    "value_and_grad": (lambda loss: lambda a: jax.value_and_grad(loss)(a)[1]),
}  # fmt: skip


@pytest.mark.parametrize("how", REVERSE)
def test_T2_reverse_mode_works_everywhere(how):
    np.testing.assert_allclose(REVERSE[how](loss)(A), REVERSE[how](truth)(A), rtol=2e-5)


SECOND = {
    "grad(grad)": lambda loss: jax.grad(lambda a: (jax.grad(loss)(a) ** 2).sum()),
    "jit(grad(grad))": lambda loss: jax.jit(jax.grad(lambda a: (jax.grad(loss)(a) ** 2).sum())),
    "jacrev(jacrev)": lambda loss: jax.jacrev(jax.jacrev(loss)),
    "grad(vmap(grad))": lambda loss: jax.grad(lambda a: (jax.vmap(jax.grad(loss))(a[None]) ** 2).sum()),
    "third": lambda loss: jax.grad(
        lambda a: (jax.grad(lambda a: (jax.grad(loss)(a) ** 2).sum())(a) ** 2).sum()
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", SECOND)
def test_higher_reverse_derivatives_go_through_the_reference(how):
    np.testing.assert_allclose(SECOND[how](loss)(A), SECOND[how](truth)(A), rtol=5e-5)


def test_a_loss_may_weigh_the_cotangent():
    """The derivative by what comes after the op reaches the backward through the cotangent alone."""
    found = jax.grad(lambda w: (jax.grad(lambda a: w * f(a).sum())(A) ** 2).sum())(1.5)
    assert found == pytest.approx(jax.grad(lambda w: (jax.grad(lambda a: w * (a @ B).sum())(A) ** 2).sum())(1.5))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_cotangents_have_the_dtype_of_the_argument(dtype):
    a, b = A.astype(dtype), B
    for da, db in (
        jax.grad(lambda a, b: registry.get("matmul")(a, b).astype("float32").sum(), (0, 1))(a, b),
        jax.jit(jax.grad(lambda a, b: registry.get("matmul")(a, b).astype("float32").sum(), (0, 1)))(a, b),
    ):
        assert (da.dtype, db.dtype) == (a.dtype, b.dtype)


def test_T4_only_what_is_differentiated_is_asked_for():
    asked = []

    def backward(request, operands, config):
        asked.append(request.wanted)
        assert list(operands) == ["a", "b", "d_out"]
        return {name: jnp.zeros(request[name].shape, request[name].dtype) for name in request.wanted}

    registry.register(
        fakes.plugin(
            "own",
            registry.Implementation("matmul", opaque_matmul, priority={"*": 99}),
            registry.Implementation("matmul_vjp", backward),
        )
    )
    matmul = registry.get("matmul")
    jax.grad(lambda a: matmul(a, B).sum())(A)
    jax.grad(lambda b: matmul(A, b).sum())(B)
    jax.grad(lambda a, b: matmul(a, b).sum(), (0, 1))(A, B)
    assert asked == [("a",), ("b",), ("a", "b")]


def test_integers_have_no_backward():
    registry.register(fakes.backend("a", 1))
    x = jnp.arange(3)
    assert registry.explain("add", x, x).backward is None
    assert registry.get("add")(x, x).tolist() == [1, 3, 5]
    assert jax.grad(lambda y: (y * registry.get("add")(x, x)).sum())(2.0) == 9


def test_an_operand_without_a_derivative_says_so():
    op = fakes.power_op(differentiable=())
    registry.register(fakes.plugin("acme", registry.Implementation("power", "fakes:power"), ops=[op]))
    assert registry.get("power")(3.0) == 9
    with pytest.raises(DifferentiationError, match="power: operand 'x' has no derivative"):
        jax.grad(registry.get("power"))(3.0)


def test_an_op_of_a_plugin_is_differentiated_through_its_reference():
    registry.register(fakes.plugin("acme", registry.Implementation("power", "fakes:power"), ops=[fakes.power_op()]))
    power = registry.get("power")
    assert jax.grad(power)(3.0) == 6
    assert jax.grad(jax.grad(lambda x: power(x, power=3)))(3.0) == 18
    assert power.explain(3.0).backward.backend == "reference"


# --- which backward -----------------------------------------------------------------------------------------------


@pytest.fixture
def adds():
    registry.register(fakes.backend("both", 1.0, vjp=fakes.gradient(10.0), priority={"*": 9}))
    registry.register(fakes.backend("forward_only", 2.0))
    registry.register(fakes.plugin("backward_only", registry.Implementation("add_vjp", fakes.gradient(30.0))))
    registry.register(fakes.backend("jax_does", 4.0, forward_mode=True))


def slope(**options):
    x = jnp.zeros(2)
    decision = registry.get("add", **options).explain(x, x)
    named = decision.backward.backend if decision.backward is not None else None
    found = jax.grad(lambda x: registry.get("add", **options)(x, jnp.zeros(2)).sum())(x)[0]
    return named, float(found)


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        (None, ("both", 10)),
        ("both", ("both", 10)),
        ("forward_only", ("reference", 1)),
        ("jax_does", (None, 1)),
        ("add=forward_only", ("reference", 1)),
        ("add=forward_only;add_vjp=backward_only", ("backward_only", 30)),
        ("forward_only;add_vjp=both", ("both", 10)),
        ("add_vjp=backward_only", ("backward_only", 30)),
        ("jax_does;add_vjp=both", ("both", 10)),
        ("both;add_vjp=backward_only,both", ("backward_only", 30)),
    ],
)
@pytest.mark.parametrize("layer", ["call", "scope", "environment"])
def test_rules_for_the_backward(adds, monkeypatch, backend, expected, layer):
    if backend is None or layer == "call":
        assert slope(backend=backend) == expected
    elif layer == "environment":
        monkeypatch.setenv("OPMUX_BACKEND", backend)
        assert slope() == expected
    else:
        with registry.use(backend=backend):
            assert slope() == expected


def test_automatic_choice_may_take_the_backward_of_another(adds):
    registry.unregister("both")
    with registry.use(prefer=["forward_only"]):
        assert slope() == ("backward_only", 30)
    with registry.use(backend="forward_only;add_vjp=auto"):
        named, found = slope()
    assert (named, found) == ("backward_only", 30)


def test_a_forced_backward_never_falls_back(adds, monkeypatch):
    monkeypatch.setenv("OPMUX_BACKEND", "add_vjp=forward_only")
    x = jnp.zeros(2)
    assert registry.get("add")(x, x)[0] == 1  # the forward does not need it
    assert registry.explain("add", x, x).backward.backend == ""
    for transform in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        with pytest.raises(ForcedBackendError, match="it has no 'add_vjp'; it has add"):
            transform(lambda x: registry.get("add")(x, x).sum())(x)
    with pytest.raises(DifferentiationError):
        jax.jvp(registry.get("add"), (x, x), (x, x))


def test_the_upper_layer_decides_on_the_backward(adds, monkeypatch):
    monkeypatch.setenv("OPMUX_BACKEND", "add_vjp=backward_only")
    assert slope() == ("backward_only", 30)
    assert slope(backend="add=both") == ("both", 10)
