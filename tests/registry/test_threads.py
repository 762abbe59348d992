"""Scopes in threads and asyncio tasks."""

import asyncio
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

import fakes
import jax
import pytest

from opmux import registry
from opmux.core.errors import OverrideScopeError, SettingError
from opmux.registry import policy


@pytest.fixture(autouse=True)
def three_backends():
    registry.register(fakes.backend("base", 0.0, priority={"*": 9}))
    registry.register(fakes.backend("a", 1.0))
    registry.register(fakes.backend("b", 2.0))


def add():
    return float(registry.get("add")(0.0, 0.0))


def jitted():
    """A new function each time: nothing is compiled for it yet."""
    return jax.jit(lambda x: registry.get("add")(x, x))


def in_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def clean():
    """Whether this thread is under no scope, as opmux and JAX's caches see it."""
    follows = jitted()
    first = float(follows(0.0))
    registry.configure(backend="b")
    second = float(follows(0.0))  # a thread with a policy of its own would not see this
    registry.configure(backend="auto")
    return policy.scopes().get() == () and (first, second) == (0.0, 2.0)


def test_F30_scopes_do_not_leak_between_threads():
    barrier, seen = threading.Barrier(2), {"a": [], "b": []}
    shared = jitted()

    def work(name):
        with registry.use(backend=name):
            for _ in range(3):
                barrier.wait()
                seen[name].append((add(), float(shared(0.0))))
        barrier.wait()
        seen[name].append((add(), float(shared(0.0))))

    threads = [threading.Thread(target=work, args=(name,)) for name in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"a": [(1, 1)] * 3 + [(0, 0)], "b": [(2, 2)] * 3 + [(0, 0)]}
    assert clean()


def test_F30_one_scope_object_in_two_threads():
    scope, barrier = registry.use(backend="a"), threading.Barrier(2)
    seen, errors = [], []

    def work(first):
        try:
            if not first:
                barrier.wait()
            with scope:
                if first:
                    barrier.wait()
                    barrier.wait()
                seen.append(add())
                if not first:
                    barrier.wait()
                    done.wait()
            if first:
                done.set()
            seen.append(add())
        except Exception as error:
            errors.append(error)
            done.set()

    done = threading.Event()
    threads = [threading.Thread(target=work, args=(first,)) for first in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (sorted(seen), errors) == ([0, 0, 1, 1], [])


def test_F30_a_new_thread_starts_clean_and_carry_takes_the_scope_along():
    with registry.use(backend="a"):
        assert in_thread(add) == 0
        assert in_thread(registry.carry(add)) == 1
        carried = registry.carry(lambda: (add(), float(jitted()(0.0))))
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(add).result() == 0
            assert pool.submit(carried).result() == (1, 1)
            assert pool.submit(add).result() == 0  # the worker is clean again
            assert list(pool.map(registry.carry(lambda x: x + add()), [10, 20])) == [11, 21]
    assert carried() == (1, 1)  # carried out of the scope, too
    assert in_thread(carried) == (1, 1)
    with registry.use(backend="b"):
        assert carried() == (1, 1)
        assert add() == 2


def test_configure_and_environment_reach_every_thread(monkeypatch):
    registry.configure(backend="a")
    assert in_thread(add) == 1
    monkeypatch.setenv("OPMUX_BACKEND", "b")
    assert in_thread(lambda: (add(), float(jitted()(0.0)))) == (2, 2)


def test_an_exception_passes_through_carry():
    def fails():
        raise KeyError("mine")

    with registry.use(backend="a"):
        carried = registry.carry(fails)
    with pytest.raises(KeyError, match="mine"):
        in_thread_raising(carried)
    assert clean()


def in_thread_raising(function):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


def test_carry_refuses_what_runs_after_the_call():
    async def task():
        pass

    def generator():
        yield

    for function in (task, generator):
        with pytest.raises(SettingError, match="whose body runs after the call"):
            registry.carry(function)


def test_asyncio_to_thread():
    """A copied context holds the scope for opmux, but not for JAX; `carry` completes it."""

    async def main():
        with registry.use(backend="a"):
            eager = await asyncio.to_thread(add)
            with pytest.raises(OverrideScopeError, match=r"registry\.carry"):
                await asyncio.to_thread(lambda: float(jitted()(0.0)))
            carried = await asyncio.to_thread(registry.carry(lambda: float(jitted()(0.0))))
            return eager, carried

    assert asyncio.run(main()) == (1, 1)
    assert clean()


def test_a_scope_without_await_is_fine_in_tasks():
    async def task(name, expected):
        for _ in range(3):
            with registry.use(backend=name):
                assert add() == expected
                assert float(jitted()(0.0)) == expected
            await asyncio.sleep(0)

    async def main():
        await asyncio.gather(task("a", 1), task("b", 2))

    asyncio.run(main())
    assert clean()


def test_J5_F30_interleaved_tasks_raise_and_leave_a_clean_state():
    after = []

    async def task(name):
        with registry.use(backend=name):
            await asyncio.sleep(0.01)
        after.append("unreachable")

    async def main():
        found = await asyncio.gather(task("a"), task("b"), return_exceptions=True)
        assert clean()
        return found

    found = asyncio.run(main())
    assert [type(error) for error in found] == [OverrideScopeError] * 2
    assert "await" in str(found[0])
    assert after == []
    assert clean()


def test_J5_each_task_keeps_its_own_choice_until_then():
    async def task(name, seen):
        with registry.use(backend=name):
            seen.append(add())
            await asyncio.sleep(0.01)
            seen.append(add())

    async def main():
        seen = [], []
        await asyncio.gather(task("a", seen[0]), task("b", seen[1]), return_exceptions=True)
        return seen

    assert asyncio.run(main()) == ([1, 1], [2, 2])
    assert clean()


def test_the_outer_scope_holds_after_interleaved_tasks():
    async def task(name):
        with registry.use(backend=name):
            await asyncio.sleep(0.01)

    async def main():
        with registry.use(backend="a"):
            found = await asyncio.gather(task("b"), task("base"), return_exceptions=True)
            assert [type(error) for error in found] == [OverrideScopeError] * 2
            return add(), float(jitted()(0.0))

    assert asyncio.run(main()) == (1, 1)
    assert clean()


def test_a_scope_across_an_await_is_fine_where_nobody_else_enters_one():
    async def other():
        await asyncio.sleep(0)
        return add()

    async def main():
        running = asyncio.ensure_future(other())
        with registry.use(backend="a"):
            await asyncio.sleep(0.01)
            assert add() == 1
        return await running

    assert asyncio.run(main()) == 0
    assert clean()


def test_a_generator_that_holds_a_scope_across_a_yield_is_noticed():
    def generator():
        with registry.use(backend="a"):
            yield add()

    running = generator()
    assert next(running) == 1
    with pytest.raises(OverrideScopeError), registry.use(backend="b"), pytest.raises(OverrideScopeError):
        next(running)
    assert clean()


def test_left_in_another_context_than_it_was_entered_in():
    scope = registry.use(backend="a")
    contextvars.copy_context().run(scope.__enter__)
    with pytest.raises(OverrideScopeError):
        scope.__exit__(None, None, None)
    assert clean()


def test_many_threads_resolve_the_same_thing():
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: add(), range(32)))
    assert found == [0] * 32
