"""A few steps recorded with ``torch.profiler``, in a file that they name."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cirron_otel import recorder, semconv
from cirron_otel.batch import LogRecord
from cirron_otel.context import get_current
from cirron_otel.profiler_bridge.ranges import Mirror
from cirron_otel.scope_base import BaseScope, current_scope

if TYPE_CHECKING:
    from types import TracebackType

    from cirron_otel.recorder import Recorder

#: A window ends at the first scope after this time, however many steps it has.
LONGEST_S = 60.0
#: What torch's profiler keeps of a step may be hundreds of megabytes.
MOST_STEPS = 1000
_FOLDER = "profiles"


class ProfileWindow:
    """A bounded recording with torch's profiler: see :func:`profile_window`.

    ``file`` is where it is or will be, None until it has begun; ``done`` says whether the file is
    there, ``error`` why it is not going to be.
    """

    def __init__(self, rec: Recorder | None, steps: int | None, options: dict[str, Any]) -> None:
        self.file: Path | None = None
        self.done = False
        self.error: str | None = None
        self._rec = rec
        self._steps = steps
        self._options = options
        self._torch_profiler: Any = None
        self._mirror: Mirror | None = None
        self._thread = 0
        self._step: BaseScope | None = None
        self._made = 0
        self._ends_at = 0.0

    # --- as a block ----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Begin now, unless it waits for steps."""
        rec = self._rec
        if rec is not None and self._steps is None:
            try:
                rec.listen(self)
                scope = current_scope(rec, get_current())
                self._begin(scope)
            except Exception as error:  # noqa: BLE001 - see _guard
                self._give_up(error)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """End, also where not all steps were made."""
        self.stop()

    def stop(self) -> None:
        """End the recording, or the waiting for it. On the thread on which it began."""
        try:
            self._finish()
        except Exception as error:  # noqa: BLE001 - see _guard
            self._give_up(error)

    # --- as a listener -------------------------------------------------------------------------

    def opened(self, scope: BaseScope) -> None:
        """A step begins: so may the recording."""
        try:
            here = threading.get_ident()
            is_step = scope.name == semconv.STEP
            if self._torch_profiler is None:
                if self._steps is None or not is_step:
                    return
                self._begin(scope)
            if self._thread != here or self._torch_profiler is None:
                return
            if is_step and (self._step is None or not self._step.is_open):
                self._step = scope
                self._link(scope)
            if self._mirror is not None:
                self._mirror.opened(scope)
            if time.monotonic() > self._ends_at:
                self._finish()
        except Exception as error:  # noqa: BLE001 - see _guard
            self._give_up(error)

    def closed(self, scope: BaseScope) -> None:
        """A step has ended: so may the recording."""
        try:
            if self._torch_profiler is None or self._thread != threading.get_ident():
                return
            if self._mirror is not None:
                self._mirror.closed(scope)
            if scope is self._step:
                self._step = None
                self._made += 1
                if self._steps is not None and self._made >= self._steps:
                    self._finish()
        except Exception as error:  # noqa: BLE001 - see _guard
            self._give_up(error)

    # --- the recording -------------------------------------------------------------------------

    def _begin(self, scope: BaseScope | None) -> None:
        rec = self._rec
        torch: Any = sys.modules.get("torch")
        if rec is None or not rec.active:
            return
        if getattr(torch, "profiler", None) is None:
            raise _NotNowError("torch is not imported")
        if torch.autograd.profiler._is_profiler_enabled:  # noqa: SLF001 - nothing public says it
            raise _NotNowError("torch's profiler is running already")
        folder = rec.spool.root / _FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self.file = _free_name(folder, rec, scope)
        recording = torch.profiler.profile(**self._options)
        recording.start()
        self._torch_profiler, self._thread = recording, threading.get_ident()
        self._ends_at = time.monotonic() + LONGEST_S
        if rec.settings.mirror != "record_function":
            self._mirror = Mirror(rec, "record_function")
        rec.listening.at_end.append(self.stop)
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            # Analysers refuse a file that names no rank.
            info = {"rank": rec.rank, "world_size": rec.settings.world_size}
            recording.add_metadata_json("distributedInfo", json.dumps(info))
        recording.add_metadata_json(semconv.RUN_ID, json.dumps(rec.run_id))
        if scope is not None and self._steps is None:
            self._link(scope)

    def _link(self, scope: BaseScope) -> None:
        if self._rec is not None and self.file is not None:
            place = os.path.relpath(self.file, self._rec.spool.root)
            scope.attrs = {**scope.attrs, semconv.PROFILE_FILE: place}

    def _finish(self) -> None:
        rec, recording = self._rec, self._torch_profiler
        self._torch_profiler = None
        if rec is None:
            return
        _forget(rec, self)
        if recording is None:
            if not self.done and self.error is None:
                self.error = "no step was made"
            return
        if self._mirror is not None:
            self._mirror.end()
        recording.stop()
        write = functools.partial(self._write, recording)
        if rec.at_exit:
            write()
            return
        # Making and compressing the file takes seconds. Not a daemon: the program waits for it.
        threading.Thread(target=write, name="cirron-otel-profile-window").start()

    def _write(self, recording: Any) -> None:  # noqa: ANN401 - torch's profiler
        rec, file = self._rec, self.file
        if rec is None or file is None:
            return
        try:
            partly = file.with_name(f".{file.name}")
            recording.export_chrome_trace(str(partly))
            partly.replace(file)
            self.done = True
            if rec.active:
                rec.batcher.append_log(self._log_row(rec, file))
        except Exception as error:  # noqa: BLE001 - see _guard
            self._give_up(error)

    def _log_row(self, rec: Recorder, file: Path) -> LogRecord:
        size = file.stat().st_size
        attrs = {
            semconv.PROFILE_FILE: os.path.relpath(file, rec.spool.root),
            semconv.PROFILE_STEPS: self._made,
            semconv.PROFILE_BYTES: size,
        }
        text = f"{self._made} steps were recorded with torch's profiler: {file}"
        return LogRecord(rec.clock.now(), 9, "INFO", semconv.PROFILE_WINDOW, text, attrs)

    def _give_up(self, error: Exception) -> None:
        rec = self._rec
        self.error = str(error) or type(error).__name__
        recording, self._torch_profiler = self._torch_profiler, None
        if rec is None:
            return
        _forget(rec, self)
        if recording is not None:
            with contextlib.suppress(Exception):
                recording.stop()
        if isinstance(error, _NotNowError):
            rec.guard.repeat_warning(
                "profile_window", f"profile_window records nothing: {self.error}"
            )
        else:
            rec.guard.swallow("profile_window", error)


class _NotNowError(RuntimeError):
    """There is nothing to record with."""


def _forget(rec: Recorder, window: ProfileWindow) -> None:
    rec.listen_no_more(window)
    with contextlib.suppress(ValueError):
        rec.listening.at_end.remove(window.stop)


def _free_name(folder: Path, rec: Recorder, scope: BaseScope | None) -> Path:
    run = re.sub(r"[^\w.-]", "_", rec.run_id)
    at = "block"
    if scope is not None and type(scope.iteration) is int:
        at = f"iteration{scope.iteration:06d}"
    stem = f"{run}-rank{rec.rank}-attempt{rec.run_state.attempt}-{at}"
    for number in range(1, 1000):
        more = "" if number == 1 else f"-{number}"
        path = folder / f"{stem}{more}.pt.trace.json.gz"
        if not path.exists() and not path.with_name(f".{path.name}").exists():
            return path
    raise _NotNowError(f"there are a thousand files like {stem} already")


def profile_window(
    steps: int | None = None,
    *,
    record_shapes: bool = False,
    profile_memory: bool = False,
    with_stack: bool = False,
) -> ProfileWindow:
    """Record the next ``steps`` steps with ``torch.profiler``; or a ``with`` block, without.

    ::

        ci.profile_window(steps=3)          # anywhere: the recording begins with the next step

        with ci.profile_window() as window: # or what a block does
            train_step(batch)

    The trace, for Perfetto and analysers of such files, is written to ``profiles/`` in the output
    directory by a thread of its own; each step in it has the attribute ``cirron.profile.file``. Our
    scopes are in it as ranges. The other keywords are those of ``torch.profiler.profile``.

    A window is over after ``steps`` (1 to 1000) or a minute, whichever comes first. One records at
    a time; where torch's profiler is running already, or torch is not imported, the log says so and
    nothing is recorded. Never raises but for a ``steps`` that is none (ValueError). While it lasts
    steps are slower, and at its end a GPU is waited for, as torch's profiler does. Begins and ends
    on the thread whose steps they are.
    """
    if steps is not None and (type(steps) is not int or not 1 <= steps <= MOST_STEPS):
        raise ValueError(f"profile_window(steps={steps!r}): a whole number from 1 to {MOST_STEPS}")
    rec = recorder._current  # noqa: SLF001
    if rec is None or not rec.active:
        return ProfileWindow(None, steps, {})
    for listener in rec.listening.scopes:
        if isinstance(listener, ProfileWindow):
            rec.guard.repeat_warning(
                "profile_window", "a profile_window is open already, and another one does nothing"
            )
            return ProfileWindow(None, steps, {})
    options = {
        "record_shapes": record_shapes, "profile_memory": profile_memory, "with_stack": with_stack,
    }  # fmt: skip
    window = ProfileWindow(rec, steps, options)
    if steps is not None:
        rec.listen(window)
    return window
