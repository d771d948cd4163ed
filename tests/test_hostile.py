"""What nobody would do to a scope: the program runs on, and other scopes keep their rows."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import cirron_otel as ci
from cirron_otel import recorder
from cirron_otel.marks import EarlyMarks
from helpers import RunProgram, read_spool

#: Every scope does it, so also the one in 64 that is timed.
_ENOUGH = 130


class _Unspeakable:
    """Raises wherever it is asked for text, or compared."""

    def __str__(self) -> str:
        raise ValueError

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        raise ValueError

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture
def _recording() -> None:
    """Record into the test's own directory."""
    ci.profile(frameworks=[])


@pytest.mark.usefixtures("_recording")
def test_exit_without_enter_does_nothing() -> None:
    """Closing a scope that was never opened neither raises nor records, timed or not."""
    for _ in range(_ENOUGH):
        ci.scope("never").__exit__(None, None, None)
        with ci.scope("between") as one:
            pass
        one.__exit__(None, None, None)
    assert ci.shutdown()
    rows = read_spool()
    assert len(rows.named("between")) == _ENOUGH
    assert not rows.named("never")


@pytest.mark.usefixtures("_recording")
def test_a_name_that_cannot_be_read_does_not_raise() -> None:
    """A name or stage whose ``__str__`` raises costs its text, not the program."""
    with ci.scope(_Unspeakable()):
        ci.mark("inside", 1)
    stage: Any = _Unspeakable()
    assert list(ci.batches([1, 2], stage=stage)) == [1, 2]
    assert ci.shutdown()
    rows = read_spool()
    assert len(rows.named("<_Unspeakable>")) == 1
    assert len(rows.named("step")) == 2


@pytest.mark.usefixtures("_recording")
@pytest.mark.parametrize(
    ("field", "value", "written"),
    [
        ("index", "third", None),
        ("index", 1.5, None),
        ("index", 2**70, None),
        ("index", True, 1),
        ("iteration", "x", None),
        ("name", 5, "5"),
        ("name", None, "None"),
    ],
)
def test_a_field_of_another_type_does_not_spoil_the_batch(
    field: str, value: object, written: object
) -> None:
    """Readers refuse a batch with one row of a wrong type, so none is written."""
    with ci.scope("neighbour"):
        pass
    with ci.scope("odd", lr=1) as one:
        setattr(one, field, value)
    assert ci.shutdown()
    rows = read_spool()
    assert len(rows.named("neighbour")) == 1
    odd = next(row for row in rows.spans if row.attrs.get("lr") == 1)
    if field != "iteration":
        assert getattr(odd, field) == written


@pytest.mark.parametrize(
    "field",
    ["name", "index", "attrs", "otel", "iteration", "prev", "ctx", "above", "trace", "extra",
     "marks", "_rec"],
)  # fmt: skip
def test_deleting_a_field_does_not_crash(run_program: RunProgram, field: str) -> None:
    """The interpreter survives, and the program never hears of it."""
    done = run_program(
        f"""
        import cirron_otel as ci
        ci.profile(frameworks=[])
        try:
            with ci.scope("outer"), ci.scope("inner") as one:
                del one.{field}
                ci.mark("number", 1.0)
                ci.mark("text", "x")
                with ci.scope("below"):
                    pass
                ci.flush()
        except AttributeError:
            assert {field!r} == "_rec"  # without its recorder a scope has nobody to tell
        ci.shutdown()
        print("survived")
        """,
        env={"CIRRON_OTEL_STRICT": "0"},
    )
    assert "survived" in done.stdout


@pytest.mark.usefixtures("_recording")
def test_marks_that_come_after_the_end_do_not_spoil_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that go on marking while the recording ends leave ``shutdown()`` successful."""
    rec = recorder._current
    assert rec is not None
    # Those marks wait for the next recording: not for another test's.
    monkeypatch.setattr(recorder, "early_marks", EarlyMarks())
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            with ci.scope("work"):
                ci.mark("loss", 1.0)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        stop.wait(0.1)
        assert ci.shutdown()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not rec.guard.losses
    rows = read_spool()
    owners = {span.id for span in rows.spans} | {"root"}  # the seed's word for marks after the end
    assert {mark.span_id for mark in rows.marks} <= owners
