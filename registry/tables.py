"""The plugins and ops of this process, and whether a name means one of them."""

from __future__ import annotations

from opmux.core.errors import UnknownBackendError, UnknownOpError
from opmux.core.op import Op
from opmux.core.ops import builtin_ops
from opmux.registry.environment import AUTO, Rules
from opmux.registry.loader import Loader

loader = Loader()


def ops(disabled: frozenset[str] = frozenset(), *, strict: bool = False) -> dict[str, Op]:
    """Every op by name: built-in ones and those of plugins."""
    found = dict(builtin_ops())
    for plugin in loader.load_all(disabled, strict=strict):
        found.update((op.name, op) for op in plugin.contents.ops)
    return dict(sorted(found.items()))


def op(name: str, where: str = "", disabled: frozenset[str] = frozenset()) -> Op:
    """The op of this name; further plugins are loaded only if neither opmux nor a loaded plugin has it.

    Raises:
      UnknownOpError: there is none.
    """
    found = builtin_ops().get(name)
    if found is not None:
        return found
    for plugin in loader.loaded():
        if plugin.name not in disabled:
            for offered in plugin.contents.ops:
                if offered.name == name:
                    return offered
    known = ops(disabled)
    if name not in known:
        raise UnknownOpError(name, known, where, _failed_note())
    return known[name]


def backend(name: str, where: str = "", disabled: frozenset[str] = frozenset()) -> str:
    """The name itself, if a plugin has it: loaded, not yet loaded, disabled, or failed.

    Raises:
      UnknownBackendError: none has.
    """
    if name not in loader.names():
        loader.load_all(disabled)  # the one that was meant may be among those that fail
        raise UnknownBackendError(name, loader.names(), where, _failed_note())
    return name


def check(rules: Rules, where: str, disabled: frozenset[str] = frozenset()) -> Rules:
    """The rules themselves, if each op and backend that they name exists.

    Raises:
      UnknownOpError, UnknownBackendError: one does not.
    """
    for rule in rules.rules:
        if rule.op != "*":
            op(rule.op.removesuffix("_vjp"), where, disabled)
        for name in rule.backends:
            if name != AUTO:
                backend(name, where, disabled)
    return rules


def _failed_note() -> str:
    """A sentence on plugins that failed to load, for errors about names that nothing answers to."""
    failures = loader.failures()
    if not failures:
        return ""
    return "Plugins that failed to load: " + "; ".join(map(str, failures)) + "."
