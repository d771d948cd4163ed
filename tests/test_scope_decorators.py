"""Scopes as decorators: each call is a scope, and the function stays what it was."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Iterator

import pytest

import cirron_otel as ci
from helpers import Rows, read_spool, tree_text


@pytest.fixture(autouse=True)
def _recording() -> None:
    """Every test here records into its own directory."""
    ci.profile(frameworks=[])


def finished() -> Rows:
    """Everything that was recorded, after an orderly shutdown."""
    assert ci.shutdown()
    return read_spool()


def canonical(rows: Rows) -> str:
    """The tree below the session, as text."""
    return "\n".join(line[2:] for line in tree_text(rows).splitlines()[1:])


def test_a_function_keeps_its_name_signature_and_result() -> None:
    """``functools.wraps`` and nothing added: no hidden argument (C.33), each call its own scope."""

    @ci.scope("work", index=2, lr=0.1)
    def work(a: int, *, b: int = 1) -> int:
        """Add."""
        return a + b

    assert [work(1), work(1, b=5)] == [2, 6]
    assert (work.__name__, work.__doc__) == ("work", "Add.")
    assert list(inspect.signature(work).parameters) == ["a", "b"]
    rows = finished()
    assert [one.index for one in rows.named("work")] == [2, 2]
    assert [one.attrs for one in rows.named("work")] == [{"lr": 0.1}] * 2
    assert rows.named("work")[0].id != rows.named("work")[1].id


def test_methods_and_recursion_nest() -> None:
    """A decorated method binds as usual; a recursive call is a child."""

    class Model:
        @ci.scope("fit")
        def fit(self, left: int) -> Model:
            return self if not left else self.fit(left - 1)

    model = Model()
    assert model.fit(2) is model
    assert canonical(finished()) == "fit\n  fit\n    fit"


def test_attributes_set_in_one_call_stay_out_of_the_next() -> None:
    """Calls of one decorated function share no attribute dictionary."""
    decorate = ci.scope("work", base=1)

    @decorate
    def work(number: int) -> None:
        with ci.scope("inner", number=number) as inner:
            inner.attrs["more"] = number

    work(1)
    work(2)
    assert decorate.attrs == {"base": 1}
    assert [one.attrs for one in finished().named("work")] == [{"base": 1}] * 2


def test_a_function_decorated_before_profile_records_after_it() -> None:
    """Decorating looks up nothing: module-level functions work whenever ``profile()`` comes."""
    ci.shutdown()

    @ci.scope("early")
    def early() -> str:
        return "result"

    assert early() == "result"
    ci.profile(frameworks=[])
    assert early() == "result"
    assert len(finished().named("early")) == 1


def test_an_exception_of_a_function_is_recorded_and_flies_on() -> None:
    """The caller sees the function's own exception, the scope bears it."""

    @ci.scope("bad")
    def bad() -> None:
        raise KeyError("k")

    with pytest.raises(KeyError):
        bad()
    assert finished().one("bad").attrs["error"] == "KeyError: 'k'"


def test_a_coroutine_function_stays_one() -> None:
    """The scope lasts until the awaited result is there."""

    @ci.scope("work")
    async def work() -> int:
        with ci.scope("inside"):
            await asyncio.sleep(0.01)
        return 7

    assert inspect.iscoroutinefunction(work)
    assert asyncio.run(work()) == 7
    rows = finished()
    assert canonical(rows) == "work\n  inside"
    assert rows.one("work").end_ns - rows.one("work").start_ns >= 9_000_000


def test_a_generator_passes_values_both_ways() -> None:
    """``send``, ``throw``, the return value and ``close`` reach the decorated generator."""
    log: list[object] = []

    @ci.scope("gen")
    def gen() -> Iterator[object]:
        try:
            got = yield "first"
            log.append(got)
            try:
                yield "second"
            except ValueError as error:
                log.append(error)
            yield "third"
        finally:
            log.append("cleanup")
        return "result"

    assert inspect.isgeneratorfunction(gen)
    one = gen()
    assert next(one) == "first"
    assert one.send("sent") == "second"  # type: ignore[attr-defined]
    error = ValueError("thrown")
    assert one.throw(error) == "third"  # type: ignore[attr-defined]
    with pytest.raises(StopIteration) as stop:
        next(one)
    assert stop.value.value == "result"
    assert log == ["sent", error, "cleanup"]

    two = gen()
    next(two)
    two.close()  # type: ignore[attr-defined]
    assert log[-1] == "cleanup"
    rows = finished()
    assert len(rows.named("gen")) == 2
    assert all("error" not in row.attrs for row in rows.named("gen"))


def test_a_generators_scope_is_current_only_while_it_runs() -> None:
    """The consumer's scopes do not hang under the generator, the generator's own do."""

    @ci.scope("gen")
    def gen() -> Iterator[int]:
        for number in range(2):
            with ci.scope("inside", number):
                pass
            yield number

    with ci.scope("consumer"):
        for number in gen():
            with ci.scope("body", number):
                pass
    assert canonical(finished()) == (
        "consumer\n  gen\n    inside[0]\n    inside[1]\n  body[0]\n  body[1]"
    )


def test_the_marks_of_a_generator_stand_on_its_scope() -> None:
    """A mark made while the generator runs is the generator's, others are the consumer's."""

    @ci.scope("gen")
    def gen() -> Iterator[int]:
        ci.mark("in gen", 1)
        yield 1

    with ci.scope("consumer"):
        for _ in gen():
            ci.mark("in body", 1)
    rows = finished()
    assert [m.name for m in rows.marks_of(rows.one("gen"))] == ["in gen"]
    assert "in body" in [m.name for m in rows.marks_of(rows.one("consumer"))]


def test_an_exception_in_a_generator_is_recorded() -> None:
    """It reaches the consumer unchanged and stands on the scope."""

    @ci.scope("gen")
    def gen() -> Iterator[int]:
        yield 1
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        list(gen())
    assert finished().one("gen").attrs["error"] == "OSError: broken"


def test_a_generator_that_is_never_started_or_dropped_leaves_no_trace() -> None:
    """No scope without a first ``next()``; a dropped one is closed by Python (C-W16)."""

    @ci.scope("gen")
    def gen() -> Iterator[int]:
        yield from range(3)

    gen()
    dropped = gen()
    next(dropped)
    del dropped
    assert ci.health()["open_scopes"] == 1  # the session
    assert len(finished().named("gen")) == 1


def test_an_async_generator_is_closed_by_its_consumer() -> None:
    """Values, ``asend``, ``athrow`` and ``aclose`` reach the decorated async generator."""
    log: list[object] = []

    @ci.scope("agen")
    async def agen() -> AsyncIterator[object]:
        try:
            with ci.scope("inside"):
                await asyncio.sleep(0)
            log.append((yield 1))
            try:
                yield 2
            except ValueError:
                yield 3
        finally:
            log.append("cleanup")

    async def main() -> list[object]:
        out: list[object] = []
        one = agen()
        out.append(await anext(one))
        with ci.scope("body"):
            out.append(await one.asend("sent"))  # type: ignore[attr-defined]
        out.append(await one.athrow(ValueError("x")))  # type: ignore[attr-defined]
        await one.aclose()  # type: ignore[attr-defined]
        return out + [value async for value in agen()]

    assert inspect.isasyncgenfunction(agen)
    assert asyncio.run(main()) == [1, 2, 3, 1, 2]
    assert log == ["sent", "cleanup", None, "cleanup"]
    assert canonical(finished()) == "agen\n  inside\nbody\nagen\n  inside"


def test_a_cancelled_coroutine_is_recorded_as_such() -> None:
    """``CancelledError`` flies on and stands on the scope."""

    @ci.scope("work")
    async def work() -> None:
        await asyncio.sleep(60)

    async def main() -> None:
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(main())
    row = finished().one("work")
    assert row.attrs["error"] == "CancelledError"
    assert row.otel.status == "error"
