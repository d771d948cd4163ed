"""The journal: what writes a training record, line by line, while the training runs.

Its files are a hash-chained diary of events and a row of metrics per check. A line is in the file
when :meth:`Journal.append` returns, so the death of the process loses none; the disk has it after
the next fsync, on a thread of its own. What cannot be written (a full disk, a removed file, an
event that is none) is counted with its reason and told in the record once there is room again; the
chain goes on without a break.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any, Self

import msgspec

from cirron_otel import ids
from cirron_otel._guard import Guard
from cirron_otel.clock import Clock
from cirron_otel.errors import RecordError
from cirron_otel.training_record.events import RECORD_VERSION, field_problems
from cirron_otel.training_record.line_text import TOOL, body_text
from cirron_otel.training_record.syncing import Syncer
from cirron_otel.training_record.writing import ends
from cirron_otel.training_record.writing.opening import RecordFiles
from cirron_otel.training_record.writing.row_text import metrics_row
from cirron_otel.training_record.writing.writer import RESERVED, Writer

if TYPE_CHECKING:
    from types import TracebackType

#: What close() waits for the last fsync.
_LAST_SYNC_S = 5.0
_MIN_SYNC_S = 0.05
_MAX_MESSAGE = 1024

#: Gives trace id (32 hex) and span id (16 hex) of where the training is now, or None.
Trace = Callable[[], tuple[str, str] | None]


class Anchor(msgspec.Struct, frozen=True):
    """The head of a record at one moment, to be kept where the training cannot rewrite it.

    ``event`` is ``run_start``, ``check`` or ``run_end``; ``step`` that of the check. ``seq`` and
    ``hash`` are those of the newest diary line, ``metrics_digest`` is the SHA-256 of the
    ``metrics_rows`` rows written by then, ``time_ns`` ns since the Unix epoch.
    """

    run_id: str
    name: str
    event: str
    seq: int
    hash: str
    metrics_digest: str
    metrics_rows: int
    time_ns: int
    step: int | None = None


class Journal:
    """A record that is being written. Thread-safe; also a context manager that closes it.

    Args:
        directory: the run directory; made if need be.
        name: the run's name; the directory's, if not given.
        run_start: the fields of ``run_start`` that only the caller knows: ``model``,
            ``parameters``, ``layers``, ``architecture_sha256``, ``optimizer``, ``torch``,
            ``config``, and further ones, such as ``code``, ``data`` and ``seed``.
        run_id: id of the run; a new one, if not given.
        rank: a journal of another rank than 0 writes nothing and makes nothing.
        fsync_interval_s: seconds between two fsyncs, made on a thread of their own; None: only
            at the end.
        overwrite: set a record that is there aside, into ``previous-<n>/``.
        append: go on with a record that is there: it is ended if nobody did, set aside as above,
            and the new one is chained to its head as the next ``segment``.
        record_error_messages: write not only the type of an exception but its message too, which
            may hold paths and data.
        signals: end the record at SIGTERM, where SIGTERM is at its default.
        strict: raise :class:`~cirron_otel.errors.RecordError` for an event or row that is not as
            the format wants it, instead of counting it; default: ``CIRRON_OTEL_STRICT=1``.
        on_anchor: called with an :class:`Anchor` at the start, after each check and at the end, on
            the thread that wrote it.
        trace: where the training is now, for ``trace_id`` and ``span_id`` of each line.

    The constructor raises :class:`~cirron_otel.errors.RecordError`
    (:class:`~cirron_otel.errors.RecordExistsError`, :class:`~cirron_otel.errors.RecordBusyError`)
    and then has left everything as it was. Nothing raises after that, but for ``strict``.

    A line goes into the page cache on the caller's thread: some ten microseconds, longer only where
    the kernel makes writers wait for a disk that cannot keep up. Nobody waits for an fsync, but
    :meth:`close`, for five seconds at most.
    """

    def __init__(  # noqa: PLR0913 - see above
        self,
        directory: str | Path,
        *,
        run_start: Mapping[str, object],
        name: str | None = None,
        run_id: str | None = None,
        rank: int = 0,
        fsync_interval_s: float | None = 5.0,
        overwrite: bool = False,
        append: bool = False,
        record_error_messages: bool = False,
        signals: bool = True,
        strict: bool | None = None,
        on_anchor: Callable[[Anchor], object] | None = None,
        trace: Trace | None = None,
        clock: Clock | None = None,
        guard: Guard | None = None,
    ) -> None:
        self.directory = Path(directory).absolute()
        self.name = self.directory.name if name is None else str(name)
        self.run_id = ids.new_row_id() if run_id is None else str(run_id)
        self.guard = guard or Guard()
        #: Optimizer steps so far, for ``run_end``; whoever counts them sets it.
        self.steps = 0
        #: Further fields of ``run_end``.
        self.end_fields: dict[str, object] = {}
        self._clock = clock or Clock()
        self._strict = os.environ.get("CIRRON_OTEL_STRICT") == "1" if strict is None else strict
        self._messages = record_error_messages
        self._on_anchor = on_anchor
        self._trace = trace
        self._writer = Writer(self._clock, None if trace is None else self._add_where)
        self._lock = threading.RLock()
        #: The thread that is in the middle of a line, and what it has to do after it.
        self._owner = 0
        self._close_with: dict[str, object] | None = None
        self._pid = os.getpid()
        self._lost_events = self._lost_rows = 0
        self._active = False
        if fsync_interval_s is not None and not fsync_interval_s >= _MIN_SYNC_S:
            raise RecordError(
                f"fsync_interval_s is {fsync_interval_s!r}: give {_MIN_SYNC_S} seconds or more, or "
                "None for an fsync at the end alone"
            )
        if rank == 0:
            self._open(self._start_fields(run_start), fsync_interval_s, overwrite, append)
            ends.opened(self, signals=signals)
            self._tell_anchor("run_start", None)

    def _open(
        self, start: dict[str, object], fsync_interval_s: float | None,
        overwrite: bool, append: bool,  # noqa: FBT001 - passed on
    ) -> None:  # fmt: skip
        files = RecordFiles(self.directory, overwrite=overwrite, append=append)
        self._files = self._writer.files = files
        try:
            self._writer.event("run_start", {**start, **files.links}, 0)
            fds = (files.diary, files.metrics)
            self._syncer = Syncer(self.directory, fds, fsync_interval_s, self._sync_failed)
        except BaseException as error:
            files.undo()
            if isinstance(error, OSError) and not isinstance(error, RecordError):
                raise RecordError(
                    f"cannot write into {self.directory}: {error.strerror or error}"
                ) from error
            raise
        self._active = True

    def _start_fields(self, given: Mapping[str, object]) -> dict[str, object]:
        start: dict[str, object] = {
            "name": self.name,
            "tool": TOOL,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "record_version": RECORD_VERSION,
            "run_id": self.run_id,
        }
        start = {**given, **start}
        wrong = field_problems(body_text({**start, "event": "run_start"})[0])
        if wrong or not RESERVED.isdisjoint(given):
            raise RecordError(f"run_start: {'; '.join(wrong) or 'a field has a reserved name'}")
        return start

    # --- writing --------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether events and rows are written: from the start to the end, on rank 0."""
        return self._active

    @property
    def head(self) -> tuple[int, str]:
        """``seq`` and ``hash`` of the newest line; -1 and 64 zeros where there is none."""
        state = self._writer.state
        return state.seq - 1, state.head

    @property
    def counts(self) -> dict[str, int]:
        """The counts so far, as ``run_end`` will have them."""
        return self._writer.state.counts.to_dict()

    @property
    def run_end(self) -> dict[str, Any] | None:
        """The line that ended the record, once it is written."""
        return self._writer.state.run_end

    def append(self, event: str, /, **fields: object) -> dict[str, Any] | None:
        """Write an event; returns its whole line, None where it was not written.

        ``event`` is one of the format's 19 types but ``run_start`` and ``run_end``, with all the
        fields its type asks for; further ones are welcome. Values that JSON has no form for
        become their text. Any thread; see the class for how long it may take.
        """
        return self._guarded("record_event", self._event, event, fields)

    def check(
        self,
        step: int,
        loss: float | None,
        grad: Mapping[str, float],
        stuck: Mapping[str, Sequence[int]],
        *,
        findings: Sequence[Mapping[str, object]] = (),
        **extra: object,
    ) -> dict[str, Any] | None:
        """Write the metrics row of a check; returns it, None where it was not written.

        ``step`` is the optimizer step, from 0, higher at each check; ``grad`` the gradient norm by
        module; ``stuck`` the channel counts (certified, constant, silent, decayed) by producer.
        Numbers that are not finite become null and stand in ``nonfinite``. After it the anchor
        goes out. Any thread; see the class for how long it may take.
        """
        more = {"findings": list(findings), **extra} if findings else extra
        row = self._guarded("record_row", self._row, step, loss, grad, stuck, more)
        if row is not None:
            self._tell_anchor("check", row["step"])
        return row

    def close(
        self, error: BaseException | None = None, *, interrupted: bool = False
    ) -> dict[str, Any] | None:
        """End the record with ``run_end``; returns that line, None where it could not be written.

        ``error`` is the exception that ended the training: its type goes into the record, its
        message only with ``record_error_messages``. ``interrupted`` says that the training did not
        get to its end. Called again it does nothing. Waits at most five seconds for the disk.
        """
        fields: dict[str, object] = {"interrupted": True} if interrupted else {}
        if error is not None:
            fields.update(self._error_fields(error), ended_by="exception")
            if not isinstance(error, Exception):  # KeyboardInterrupt, SystemExit
                fields["interrupted"] = True
        return self._close(fields, _LAST_SYNC_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close(error)

    def health(self) -> dict[str, Any]:
        """Whether it is written, how far it is, and what was lost, by reason."""
        state = self._writer.state
        return {
            "active": self._active,
            "events": state.seq,
            "rows": state.rows,
            "lost_events": self._lost_events,
            "lost_rows": self._lost_rows,
            "losses": {
                key: count for key, count in self.guard.losses.items() if key.startswith("record_")
            },
        }

    # --- the end of the process (see ends.py) -----------------------------------------------------

    def end(self, *, signal_name: str | None, timeout_s: float) -> bool:
        """End the record because the process ends; waits at most about ``timeout_s``.

        False where the calling thread, interrupted by a signal, is in the middle of a line.
        """
        if self._owner == get_ident():
            return False
        if not self._writes_here():
            return True
        if not self._lock.acquire(timeout=timeout_s):
            return True
        try:
            fields: dict[str, object] = {"interrupted": True, "ended_by": "exit"}
            error = _last_error()
            if signal_name is not None:
                fields.update(ended_by="signal", signal=signal_name)
            elif error is not None:
                fields.update(self._error_fields(error), ended_by="exception")
            self._close(fields, timeout_s)
        finally:
            self._lock.release()
        return True

    def after_fork(self) -> None:
        """This is a forked child: nothing is written here, and the parent's lock is let go."""
        self._lock = threading.RLock()
        self._owner = 0
        if self._active:
            self._active = False
            self._syncer.abandon()
            self._files.close()

    # --- inside -----------------------------------------------------------------------------------

    def _event(self, event: str, fields: Mapping[str, object]) -> dict[str, Any]:
        if event in {"run_start", "run_end"}:
            raise RecordError(f"{event} is written by the journal itself")
        line = self._writer.event(event, fields, self._lost_events)
        self._syncer.wrote()
        return line

    def _row(
        self,
        step: int,
        loss: float | None,
        grad: Mapping[str, float],
        stuck: Mapping[str, Sequence[int]],
        more: Mapping[str, object],
    ) -> dict[str, Any]:
        row = self._writer.row(metrics_row(step, loss, grad, stuck, more), self._lost_rows)
        self._syncer.wrote()
        return row

    def _end(self, fields: Mapping[str, object]) -> dict[str, Any]:
        line = self._writer.end(
            {"run_id": self.run_id, **self.end_fields, **fields},
            steps=self.steps,
            lost_events=self._lost_events,
            lost_rows=self._lost_rows,
        )
        self._syncer.wrote()
        return line

    def _guarded(
        self,
        place: str,
        write: Callable[..., dict[str, Any]],
        *what: Any,
    ) -> dict[str, Any] | None:
        """Write under the lock; what goes wrong is counted as lost and does not get out."""
        me = get_ident()
        if not self._writes_here():
            if self.run_end is not None:
                self.guard.lost(f"{place}_after_end")
            return None
        if self._owner == me:  # called by a signal handler, or by a value's own __str__
            self._lost(place, "inside_another")
            return None
        try:
            with self._lock:
                if self._has_ended():  # another thread was first
                    self.guard.lost(f"{place}_after_end")
                    return None
                self._owner = me
                try:
                    return write(*what)
                finally:
                    self._owner = 0
        except RecordError as error:
            self._lost(place, "refused", str(error))
            if self._strict:
                raise
        except OSError as error:
            self._lost(place, "not_written", error.strerror or str(error))
        except Exception as error:  # noqa: BLE001 - see _guard
            self._lost(place, "failed")
            self.guard.swallow(place, error)
        finally:
            if self._close_with is not None or ends.state.postponed is not None:
                self._catch_up()
        return None

    def _has_ended(self) -> bool:
        return not self._active or self.run_end is not None

    def _writes_here(self) -> bool:
        return self._active and os.getpid() == self._pid

    def _catch_up(self) -> None:
        """Do what was asked for while a line was being written by this thread."""
        fields, self._close_with = self._close_with, None
        if fields is not None:
            self._close(fields, _LAST_SYNC_S)
        if ends.state.postponed is not None:
            ends.resume()

    def _lost(self, place: str, reason: str, why: str = "") -> None:
        if place == "record_row":
            self._lost_rows += 1
        else:
            self._lost_events += 1
        self.guard.lost(f"{place}_{reason}")
        if why:
            self.guard.warn(
                f"{place}_{reason}:{self.directory}",
                f"the training record in {self.directory} lacks a line: {why}. Further ones are "
                "counted, and the record says how many once it can be written.",
            )

    def _close(self, fields: dict[str, object], timeout_s: float) -> dict[str, Any] | None:
        if self._owner == get_ident():
            self._close_with = fields
            return None
        try:
            self._put_end(fields)
        except BaseException:  # of a signal handler: a second Ctrl-C
            self._put_end(fields)
            raise
        finally:
            self._finish(timeout_s)
        return self.run_end

    def _put_end(self, fields: Mapping[str, object]) -> None:
        if self._active and self.run_end is None:
            self._guarded("record_run_end", self._end, fields)

    def _finish(self, timeout_s: float) -> None:
        with self._lock:
            if not self._writes_here():
                return
            self._active = False
        try:
            ends.closed(self)
            if self.run_end is not None:
                self._tell_anchor("run_end", None)
            self._syncer.finish(timeout_s)
        finally:
            self._syncer.finish(0)
            self._files.close()

    def _tell_anchor(self, event: str, step: int | None) -> None:
        if self._on_anchor is None:
            return
        state = self._writer.state
        try:
            self._on_anchor(
                Anchor(
                    self.run_id, self.name, event, state.seq - 1, state.head, state.digest,
                    state.rows, self._clock.now(), step,
                )
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001 - the caller's function
            self.guard.lost("record_anchor_failed")
            self.guard.warn(
                f"record_anchor:{self.directory}", f"an anchor did not get out: {error!r}"
            )

    def _add_where(self, given: dict[str, object]) -> None:
        try:
            where = self._trace() if self._trace is not None else None
        except Exception:  # noqa: BLE001 - the caller's function; the event matters more
            self.guard.lost("record_trace_failed")
            return
        if where is not None:
            given["trace_id"], given["span_id"] = where

    def _sync_failed(self, error: OSError) -> None:
        self.guard.lost("record_fsync_failed")
        self.guard.warn(
            f"record_fsync:{self.directory}",
            f"the training record in {self.directory} may not be on the disk: {error.strerror}",
        )

    def _error_fields(self, error: BaseException) -> dict[str, object]:
        kind = type(error).__name__
        if not self._messages:
            return {"error": kind}
        try:
            return {"error": f"{kind}: {str(error)[:_MAX_MESSAGE]}"}
        except Exception:  # noqa: BLE001 - a user's __str__ may raise anything
            return {"error": kind}


def _last_error() -> BaseException | None:
    """The exception that ends the program, where one does."""
    if hasattr(sys, "ps1"):  # interactive: it may be of any statement before
        return None
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
