"""Plugins, entry points and devices that exist only in tests."""

import jax
import jax.numpy as jnp
from pydantic import Field

from opmux.core import devices
from opmux.core.config import Config
from opmux.core.implementation import BackendInfo, Implementation, Rejection
from opmux.core.op import Call, Cost, Op, make_request
from opmux.core.request import ArraySpec
from opmux.registry import hookimpl

ZERO = 0.0


class Plugin:
    """Hooks are set on the instance, so that each fake has those it needs."""


def plugin(name, *implementations, ops=None, rank=None, **info):
    """A plugin object; its priority table, predicate and so on are those of its implementations."""
    made = Plugin()
    made.__name__ = f"fake.{name}"
    made.opmux_backend = hookimpl(lambda: BackendInfo(name, **info))
    made.opmux_implementations = hookimpl(lambda: list(implementations))
    if ops is not None:
        made.opmux_ops = hookimpl(lambda: ops)
    if rank is not None:
        made.opmux_rank = hookimpl(rank)
    return made


def adds(marker, calls=None):
    """A kernel of `add` whose result says that it was this one: the sum and `marker`."""

    def kernel(request, operands, config):
        if calls is not None:
            calls.append(marker)
        return {"out": operands["x"] + operands["y"] + jnp.asarray(marker, operands["x"].dtype)}

    return kernel


def backend(name, marker, *, calls=None, info=None, vjp=None, **kwargs):
    """A plugin with one kernel of `add`, told by its marker, and perhaps one of its backward."""
    found = [Implementation("add", kernel=adds(marker, calls), **kwargs)]
    if vjp is not None:
        found.append(Implementation("add_vjp", kernel=vjp))
    return plugin(name, *found, **(info or {}))


def gradient(marker, calls=None):
    """A kernel of `add_vjp`, of operands of one shape, that is wrong by design: by the factor `marker`."""

    def kernel(request, operands, config):
        if calls is not None:
            calls.append(marker)
        return {name: (operands["d_out"] * marker).astype(request[name].dtype) for name in request.wanted}

    return kernel


def rejects(code="dtype", detail="no", hint=""):
    """A predicate that turns everything down."""
    return lambda request, device: [Rejection(code, detail, hint)]


def only(*names):
    """A predicate that takes requests for these devices."""
    return lambda request, device: [] if device.name in names else [Rejection("capability", f"not on {device.name}")]


class Blocks(Config):
    block: int = Field(default=64, gt=0, multiple_of=8)


# --- an op of a plugin -------------------------------------------------------------------------------------------


def _canonicalize(x, *, power=2):
    """`x` to a power."""
    operands = {"x": jnp.asarray(x)}
    return Call(make_request("power", operands, power, ("out",)), operands, lambda outputs: outputs["out"])


def power_op(name="power", differentiable=("x",)):
    return Op(
        name=name,
        canonicalize=_canonicalize,
        outputs=lambda request: {"out": ArraySpec(request["x"].shape, request["x"].dtype)},
        reference=lambda request, operands: {"out": operands["x"] ** request.params},
        cost=lambda request: Cost(request["x"].size, 2 * request["x"].nbytes),
        static=("power",),
        differentiable=differentiable,
    )


def power(request, operands, config):
    """A kernel that is imported by name."""
    return {"out": operands["x"] ** request.params}


# --- entry points ------------------------------------------------------------------------------------------------


class Dist:
    def __init__(self, name, version="1.0"):
        self.name, self.version = name, version


class EmptyDist:
    """The metadata of a distribution whose files are gone, as Python 3.11 reads it."""

    @property
    def name(self):
        raise TypeError("initial_value must be str or None")

    version = name


class Point:
    """An entry point; `loads` is what loading it gives, or raises."""

    def __init__(self, name, loads=None, *, dist="acme", version="1.0", value=None):
        self.name = name
        self.value = value or f"{name}.plugin"
        self.dist = Dist(dist, version) if isinstance(dist, str) else dist
        self.loads = loads
        self.times = 0

    def load(self):
        self.times += 1
        if isinstance(self.loads, BaseException):
            raise self.loads
        return self.loads


# --- devices -----------------------------------------------------------------------------------------------------


def standing_for(names):
    """The CPU devices that stand for the named ones."""
    return jax.devices("cpu")[: len(names)]


def pretend(names):
    """A `devices.from_jax` for which they are the named ones."""
    facts = {device.id: devices.device(name) for device, name in zip(standing_for(names), names, strict=True)}
    return lambda device: facts.get(getattr(device, "id", None), devices.device("cpu"))
