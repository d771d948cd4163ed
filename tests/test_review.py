"""Small promises that a review found broken, each kept since."""

from __future__ import annotations

import gc
import io
import os
import threading
import weakref

import pytest
import torch
from opentelemetry import trace as otel_trace
from opentelemetry.trace import StatusCode

import cirron_otel as ci
from cirron_otel import recorder, starting
from cirron_otel.lifecycle import Lifecycle
from cirron_otel.process_usage import peak_bytes
from helpers import RunProgram, read_spool


def test_early_marks_hold_no_object_of_the_users() -> None:
    """A loss marked before ``profile()`` is kept as a number, its graph is free to go."""
    loss = torch.ones(1, requires_grad=True).sum()
    array = torch.ones(2, 2)
    gone = [weakref.ref(loss), weakref.ref(array)]
    ci.mark("loss", loss, model=array)
    ci.mark("bad", array)
    del loss, array
    gc.collect()
    assert [one() for one in gone] == [None, None]
    ci.profile(frameworks=[])
    assert ci.health()["losses"] == {"unsupported_mark_value": 1}
    ci.shutdown()
    (mark,) = read_spool().marks
    assert (mark.name, mark.value, mark.span_id) == ("loss", 1.0, "root")


def test_early_marks_raise_nothing() -> None:
    """Names, values and kinds that raise when they are looked at; they are counted, not raised."""

    class Odd(int):
        def __str__(self) -> str:
            raise KeyError("str")

        def __int__(self) -> int:
            raise KeyError("int")

    ci.mark(Odd(1), Odd(2), kind=Odd(3))  # type: ignore[arg-type]
    ci.mark("fine", 1)
    ci.profile(frameworks=[])
    ci.shutdown()
    assert "fine" in [one.name for one in read_spool().marks]


def test_an_idle_scope_has_every_span_method() -> None:
    """Code that uses its scope as a span runs the same when nothing is recorded."""
    with ci.scope("x") as s:
        s.add_event("e", {"k": 1})
        s.add_link(otel_trace.INVALID_SPAN_CONTEXT)
        s.record_exception(ValueError("x"))
        s.set_status(StatusCode.ERROR, "no")
        s.update_name("y")
        assert isinstance(s, otel_trace.Span)
        assert s.is_recording() is False
        assert s.get_span_context().is_valid is False


@pytest.mark.parametrize("early", [True, False])
def test_a_decorator_whose_index_is_no_number(early: bool) -> None:  # noqa: FBT001
    """The index is kept as an attribute at each call, whenever the function was decorated."""
    if not early:
        ci.profile(frameworks=[])

    @ci.scope("f", index="abc", lr=1)  # type: ignore[arg-type]
    def f() -> int:
        return 7

    if early:
        ci.profile(frameworks=[])
    assert (f(), f()) == (7, 7)
    ci.shutdown()
    found = [(row.index, row.attrs) for row in read_spool().named("f")]
    assert found == [(None, {"index": "abc", "lr": 1})] * 2


def test_trace_without_a_spool_says_so() -> None:
    """``output="stdout"`` writes no spool: a line says it, the other formats answer empty."""
    profiler = ci.profile(frameworks=[], output="stdout")
    out = io.StringIO()
    ci.trace(file=out)
    assert out.getvalue() == "there is no tree to show: output has no 'spool'\n"
    assert ci.trace("dict") == profiler.trace("dict") == {"roots": [], "span_count": 0}
    assert ci.trace("json") == '{"roots":[],"span_count":0}'
    with pytest.raises(ValueError, match="trace\\(format='xml'\\)"):
        ci.trace("xml")  # type: ignore[call-overload]


class BadHooks:
    """Hooks that cannot be taken away."""

    names: tuple[str, ...] = ()

    def uninstall(self) -> None:
        """Fail."""
        raise LookupError("ours")


def test_an_error_of_ours_never_replaces_the_programs() -> None:
    """The program's exception leaves the block, even in strict mode; the session is written."""
    profiler = ci.profile(frameworks=[])
    profiler._hooks = BadHooks()  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError), profiler:
        raise ZeroDivisionError
    assert ci.health()["enabled"] is False
    assert recorder._current is None
    assert read_spool().one("cirron.session").end_ns


def test_a_profiler_swallows_what_goes_wrong_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own methods count an error and answer, as the module's functions do."""
    monkeypatch.delenv("CIRRON_OTEL_STRICT")
    profiler = ci.profile(frameworks=[])

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise RuntimeError(text)

    profiler.trace(file=Closed())
    assert profiler.flush("soon") is False  # type: ignore[arg-type]
    assert profiler.health()["swallowed_errors"].keys() == {"trace", "flush"}
    profiler._hooks = BadHooks()  # type: ignore[assignment]
    assert profiler.shutdown() is False
    assert profiler.health()["swallowed_errors"]["shutdown"] == 1
    assert recorder._current is None


def test_a_start_that_fails_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No hook, no thread, no session, no patch; and the next ``profile()`` may succeed."""

    class Late(Lifecycle):
        def install(self) -> None:
            super().install()
            raise OSError("no more of these")

    before = os._exit, threading.Thread.start, torch.nn.Module.__call__
    monkeypatch.delenv("CIRRON_OTEL_STRICT")
    with monkeypatch.context() as patched:
        patched.setattr(starting, "Lifecycle", Late)
        profiler = ci.profile()
    assert "could not start" in caplog.text
    assert (profiler.enabled, profiler.installed_hooks) == (False, [])
    assert recorder._current is None
    assert (os._exit, threading.Thread.start, torch.nn.Module.__call__) == before
    assert otel_trace.get_current_span() is otel_trace.INVALID_SPAN
    assert "cirron-otel-flush" not in [one.name for one in threading.enumerate()]
    assert ci.profile(frameworks=[]).enabled


def test_profile_after_a_disabled_one_records() -> None:
    """``profile(enabled=False)`` is no recording that a later call would have to respect."""
    assert not ci.profile(enabled=False).enabled
    ci.mark("dropped", 1)
    assert ci.profile(frameworks=[]).enabled
    with ci.scope("x"):
        pass
    ci.shutdown()
    rows = read_spool()
    assert len(rows.named("x")) == 1
    assert "dropped" not in [one.name for one in rows.marks]


def test_a_hook_is_named_only_while_it_is_in_place(run_program: RunProgram) -> None:
    """Not before torch is imported, not after shutdown; the session names it from then on."""
    run = run_program(
        """
        import sys
        import cirron_otel as ci

        p = ci.profile()
        assert "torch" not in sys.modules
        assert p.installed_hooks == ci.health()["installed_hooks"] == []
        import torch
        assert p.installed_hooks == ci.health()["frameworks_installed"] == ["torch"]
        ci.shutdown()
        assert p.installed_hooks == []
        """
    )
    assert run.one("cirron.session").attrs["framework"] == "torch"


def test_a_program_without_torch_names_no_framework(run_program: RunProgram) -> None:
    """That torch is installed is nothing about this run."""
    run = run_program("import cirron_otel as ci\nci.profile()\n")
    assert "framework" not in run.one("cirron.session").attrs


def test_memory_peak_on_both_kinds_of_system() -> None:
    """``ru_maxrss`` is bytes on macOS and KiB elsewhere."""
    assert peak_bytes(2048, "darwin") == 2048
    assert peak_bytes(2, "linux") == 2048


def test_a_child_that_shut_down_is_not_started_again(run_program: RunProgram) -> None:
    """After its own ``shutdown()`` a child process records nothing more, nor keeps marks."""
    child = (
        "import cirron_otel as ci\n"
        "with ci.scope('mine'): pass\n"
        "ci.shutdown()\n"
        "with ci.scope('late'): pass\n"
        "ci.mark('late', 1)\n"
    )
    run = run_program(
        f"""
        import subprocess, sys
        import cirron_otel as ci
        ci.profile(frameworks=[])
        subprocess.run([sys.executable, "-c", {child!r}], check=True)
        """
    )
    assert run.one("mine").parent_id == run.one("cirron.session").id
    assert run.named("late") == []
    assert "late" not in [one.name for one in run.marks]
