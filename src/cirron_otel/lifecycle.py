"""Where the recorder meets the end of things: exits, signals, forks, threads.

Everything patched here is put back by :func:`uninstall`; where somebody else has patched on top
meanwhile, our part stays in place and does nothing.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from cirron_otel import children, recorder, semconv
from cirron_otel.context import attach_context, get_current

if TYPE_CHECKING:
    from opentelemetry.context import Context

_SIGNAL_WAIT_S = 1.0
_EXIT_WAIT_S = 0.5
#: They must not keep a session alive in their context.
_OUR_THREADS = "cirron-otel-"
_Handler = Callable[[int, FrameType | None], Any] | int | None


class Lifecycle:
    """What a recorder changes in its process, and how it is undone. Main API thread only."""

    def __init__(self, rec: recorder.Recorder) -> None:
        self._rec = rec
        self._undo: list[Callable[[], None]] = []
        self.active = True

    def install(self) -> None:
        """Take the process's ends into account."""
        atexit.register(self._at_exit)
        self._undo.append(lambda: atexit.unregister(self._at_exit))
        self._patch(os, "_exit", self._make_exit)
        # Nothing else tells, when the interpreter ends, with what status it does.
        self._patch(sys, "exit", self._make_sys_exit)
        # A server that has handled a signal raises it again when it is done, with the disposition
        # from before (uvicorn does): the process ends there, with what came since unwritten.
        self._patch(signal, "raise_signal", self._make_raise)
        self._patch(threading.Thread, "start", self._make_start)
        self._patch(concurrent.futures.ThreadPoolExecutor, "submit", self._make_submit)
        self._carry()
        # A DataLoader worker has torch's own handler, in C, which Python does not know of: it ends
        # the worker quietly where the main process says so. Ours would put it away.
        if (
            self._rec.settings.signals
            and threading.current_thread() is threading.main_thread()
            and self._rec.worker_id() is None
        ):
            for number in (signal.SIGTERM, signal.SIGINT):
                self._handle(number)

    def uninstall(self) -> None:
        """Put everything back."""
        self.active = False
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    # --- patches -------------------------------------------------------------------------------

    def _patch(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:  # noqa: ANN401
        original = getattr(owner, name)
        ours = make(original)
        setattr(owner, name, ours)

        def undo() -> None:
            if getattr(owner, name) is ours:
                setattr(owner, name, original)

        self._undo.append(undo)

    def _make_sys_exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def sys_exit(status: Any = None, /) -> Any:  # noqa: ANN401 - as sys.exit takes it
            if self.active and self._rec.run is not None:
                self._rec.run.exiting(status)
            return original(status)

        return sys_exit

    def _make_exit(self, original: Callable[[int], Any]) -> Callable[[int], Any]:
        @functools.wraps(original)
        def _exit(status: int) -> None:
            if self.active:
                try:
                    if self._rec.run is not None:
                        self._rec.run.exiting(status)
                    self._rec.finalize(_EXIT_WAIT_S)
                except Exception as error:  # noqa: BLE001 - see _guard
                    self._rec.guard.swallowed["os._exit"] += 1
                    del error
            original(status)

        return _exit

    def _make_raise(self, original: Callable[[int], Any]) -> Callable[[int], Any]:
        @functools.wraps(original)
        def raise_signal(signalnum: int) -> None:
            if (
                self.active
                and signalnum in (signal.SIGTERM, signal.SIGINT)
                and signal.getsignal(signalnum) is signal.SIG_DFL
            ):
                if self._rec.run is not None:
                    self._rec.run.signalled(signal.Signals(signalnum).name)
                self._write_before(signalnum, fatal=True)
            original(signalnum)

        return raise_signal

    def _make_start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def start(thread: threading.Thread) -> None:
            if self.active and not thread.name.startswith(_OUR_THREADS):
                context = get_current()
                if context:
                    thread.run = functools.partial(_run_in, thread, thread.run, context)  # type: ignore[method-assign]
            original(thread)

        return start

    def _make_submit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def submit(pool: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if not self.active:
                return original(pool, fn, *args, **kwargs)
            context = get_current()
            if not context:
                return original(pool, fn, *args, **kwargs)
            return original(pool, functools.partial(_call_in, context, fn), *args, **kwargs)

        return submit

    # --- environment -----------------------------------------------------------------------------

    def _carry(self) -> None:
        rec = self._rec
        if rec.session is None or rec.is_child:
            return  # a child's own children find the same carrier
        before = os.environ.get(semconv.CARRIER_VARIABLE)
        os.environ[semconv.CARRIER_VARIABLE] = children.carrier(rec, rec.session)

        def undo() -> None:
            if before is None:
                os.environ.pop(semconv.CARRIER_VARIABLE, None)
            else:
                os.environ[semconv.CARRIER_VARIABLE] = before

        self._undo.append(undo)

    # --- ends ------------------------------------------------------------------------------------

    def _at_exit(self) -> None:
        if not self.active:
            return
        rec = self._rec
        try:
            if rec.is_child:
                rec.finalize(_EXIT_WAIT_S)
            else:
                rec.at_exit = True
                rec.shutdown()
        except Exception as error:  # noqa: BLE001 - the process ends, whatever happens here
            rec.guard.repeat_warning("atexit", f"the last flush failed: {error!r}")

    def _handle(self, number: int) -> None:
        previous = signal.getsignal(number)
        if previous is signal.SIG_IGN or previous is None:
            return

        def handler(received: int, frame: FrameType | None) -> None:
            self._on_signal(received, frame, previous)

        signal.signal(number, handler)

        def undo() -> None:
            if threading.current_thread() is not threading.main_thread():
                return
            if signal.getsignal(number) is handler:
                signal.signal(number, previous)

        self._undo.append(undo)

    def _on_signal(self, number: int, frame: FrameType | None, previous: _Handler) -> None:
        """Have the flush thread write, wait for it a little, then do what was to be done.

        Runs on the main thread between two bytecodes, which may hold any lock: none is taken.
        """
        # A training record's handler ends the process too, after the record.
        fatal = previous is signal.SIG_DFL or getattr(previous, "ends_process", False)
        if self.active:
            if self._rec.run is not None:
                self._rec.run.signalled(signal.Signals(number).name)
            self._write_before(number, fatal=fatal)
        if callable(previous):
            previous(number, frame)
        elif fatal:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _write_before(self, number: int, *, fatal: bool) -> None:
        """Have the flush thread write before a signal takes its course; waits 1 s at most."""
        rec = self._rec
        if not rec.flushes.alive:
            return
        if fatal:
            rec.last_words = signal.Signals(number).name
        want = rec.flushes.begun + 1
        rec.flushes.ring()
        deadline = time.monotonic() + _SIGNAL_WAIT_S
        while rec.flushes.done < want and time.monotonic() < deadline:
            time.sleep(0.002)


def _run_in(thread: threading.Thread, run: Callable[[], None], context: Context) -> None:
    """Run a thread's body in the context it was started in."""
    with contextlib.suppress(AttributeError):
        del thread.run  # the attribute was only for the way over; the method is back
    attach_context(context)
    run()


def _call_in(context: Context, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Call ``fn`` in the context it was submitted in; the pool's thread keeps its own."""
    before = get_current()
    attach_context(context)
    try:
        return fn(*args, **kwargs)
    finally:
        attach_context(before)
