"""The helper process of ``forward="process"``: what runs in it, and how the recorder holds it.

It owns all encoding for destinations, compression and network, so that of the delivery nothing
takes the training's interpreter lock. The recorder writes orders to its standard input and reads
reports from its standard error, one JSON object a line; secrets go that way too, never through
arguments or the environment. It is started, watched and started again by a thread of its own, so
that the program never waits for it.

It outlives the program by the exit budget at most: it sees the end of its standard input, or that
it has got another parent, closes what the dead program left open, sends what it can, and ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from cirron_otel._guard import Guard, logger
from cirron_otel.courier import no_health
from cirron_otel.destinations.base import DestinationSpec
from cirron_otel.forwarder import Forwarder, Left, close_dead_writers
from cirron_otel.lanes import Lane, Listing
from cirron_otel.transport import connect

THREAD_NAME = "cirron-otel-helper"

#: How often the helper looks whether its parent lives, and reports.
_LOOK_S = 0.5
#: Of the time to stop, so much is for the helper to say what is left; and a little is added.
_GOODBYE_S = 0.1
_GRACE_S = 0.3
_WAIT_S = 0.005
_LONGEST_PAUSE_S = 30.0
#: Of what a dying helper wrote, this much is repeated in the log.
_LAST_WORDS = 500


class Order(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line to the helper: the first says what to do, later ones wake or stop it."""

    root: str | None = None
    parent: int = 0
    destinations: list[DestinationSpec] = []
    max_bytes: int | None = None
    exit_budget: float = 3.0
    wake: bool = False
    #: Drain until this time of the monotonic clock, which both share; report what is left; end.
    stop_at: float | None = None


class Report(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line from the helper."""

    health: list[dict[str, Any]] | None = None
    level: int = 0
    message: str | None = None
    left: list[Left] | None = None


# --- in the recorder's process -------------------------------------------------------------------


def can_be_started() -> bool:
    """Whether ``sys.executable`` runs Python code that it is given.

    That of a frozen program, or of one that embeds Python, would start the whole program again.
    """
    name = Path(sys.executable or "").name.lower()
    return not getattr(sys, "frozen", False) and ("python" in name or "pypy" in name)


class ForwardProcess:
    """The recorder's hold on its helper; the same methods as a :class:`Forwarder`.

    :meth:`start` and :meth:`wake` never block, :meth:`stop` for at most its timeout and a little.
    """

    def __init__(
        self,
        root: Path,
        destinations: list[DestinationSpec],
        *,
        guard: Guard,
        max_bytes: int | None = None,
        exit_budget: float = 3.0,
    ) -> None:
        """Start nothing."""
        self._order = Order(
            root=str(root),
            parent=os.getpid(),
            destinations=destinations,
            max_bytes=max_bytes,
            exit_budget=exit_budget,
        )
        self._guard = guard
        #: The event stream is the program's own standard output, wherever that leads.
        self._writes_events = any(spec.kind == "event_stream" for spec in destinations)
        self.restarts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: int | None = None
        self._reports: int | None = None
        self._thread: threading.Thread | None = None
        self._ending = False
        self._stop_at: float | None = None
        self._left: list[Left] | None = None
        self._health = [no_health(spec.name, spec.description) for spec in destinations]
        #: Held for a write or a close of the pipe to the helper, neither of which blocks.
        self._lock = threading.Lock()

    def start(self) -> None:
        """Have the helper started, on a thread of its own."""
        self._thread = threading.Thread(target=self._watch, name=THREAD_NAME, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is shutting down: the spool keeps everything
            self._thread = None

    def wake(self) -> None:
        """Have new batches looked for now."""
        self._tell(Order(wake=True))

    def stop(self, timeout: float) -> list[Left]:
        """Drain for at most ``timeout`` seconds, then end the helper."""
        deadline = time.monotonic() + timeout
        self._stop_at = deadline
        self._tell(Order(stop_at=deadline - _GOODBYE_S))
        last = deadline + _GRACE_S
        while self._left is None and self.alive and time.monotonic() < last:
            time.sleep(_WAIT_S)
        self._ending = True
        self._close_orders()
        process = self._process
        if process is not None:
            said_goodbye = self._left is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S if said_goodbye else 0)
            if process.poll() is None:
                process.kill()
        if self._thread is not None:
            self._thread.join(_GRACE_S)
        return self._left_on_disk() if self._left is None else self._left

    def _left_on_disk(self) -> list[Left]:
        """What a helper that did not say goodbye has left, as its cursors tell."""
        listing = Listing(Path(self._order.root or "."))
        listing.refresh(force=True)
        errors = {str(one["name"]): one["last_error"] for one in self._health}
        found = [
            Left(spec.description, Lane(listing, spec.name).unsettled(), errors.get(spec.name))
            for spec in self._order.destinations
        ]
        return [left for left in found if left.batches]

    @property
    def alive(self) -> bool:
        """Whether the helper is watched; it may be between two starts."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def pid(self) -> int | None:
        """The helper's process id, once it was started."""
        return None if self._process is None else self._process.pid

    def health(self) -> list[dict[str, Any]]:
        """What the helper reported last, at most a second ago."""
        return self._health

    def after_fork(self) -> None:
        """In a forked child: let go of the pipes, so that the helper sees its parent's end."""
        self._lock = threading.Lock()
        self._thread = None
        self._close_orders()
        reports, self._reports = self._reports, None
        if reports is not None:
            with contextlib.suppress(OSError):
                os.close(reports)
        if self._process is not None:
            # Not this process's child: there is nothing to wait for, or to warn of.
            self._process.returncode = 0
            self._process = None

    def _tell(self, order: Order) -> None:
        with self._lock, contextlib.suppress(OSError):  # a full or broken pipe: it is watched
            if self._orders is not None:
                os.write(self._orders, msgspec.json.encode(order) + b"\n")

    def _close_orders(self) -> None:
        with self._lock:
            orders, self._orders = self._orders, None
            if orders is not None:
                with contextlib.suppress(OSError):
                    os.close(orders)

    def _watch(self) -> None:
        pause = 0.5
        while not self._is_over():
            began = time.monotonic()
            words = ""
            try:
                words = self._listen(self._spawn())
            except Exception as error:  # noqa: BLE001 - the helper's trouble is not the program's
                words = repr(error)
            self._let_go()
            if self._is_over():
                return
            self.restarts += 1
            self._guard.repeat_warning(
                "forward_process",
                f"the forwarding process ended and is started again: {words[-_LAST_WORDS:]}",
            )
            pause = 1.0 if time.monotonic() - began > _LONGEST_PAUSE_S else min(pause * 2, 30.0)
            until = time.monotonic() + pause
            while time.monotonic() < until and not self._ending:
                time.sleep(0.05)

    def _is_over(self) -> bool:
        return self._ending or self._left is not None

    def _spawn(self) -> subprocess.Popen[bytes]:
        # -P and -c: neither the working directory nor the program's own folder may put their
        # modules before the standard library's, and the package is found as it was found here.
        home = str(Path(__file__).resolve().parent.parent)
        code = (
            f"import sys; sys.path.append({home!r}); "
            "from cirron_otel.forward_process import main; sys.exit(main())"
        )
        # Plain descriptors: a file object's lock may be held in the moment of a fork.
        their_orders, orders = os.pipe()
        try:
            reports, their_reports = os.pipe()
        except OSError:  # no descriptors left
            os.close(their_orders)
            os.close(orders)
            raise
        self._orders, self._reports = orders, reports
        try:
            os.write(orders, msgspec.json.encode(self._order) + b"\n")
            os.set_blocking(orders, False)
            process = subprocess.Popen(  # noqa: S603 - our own interpreter
                [sys.executable, "-P", "-c", code, "cirron-otel-forward"],
                stdin=their_orders,
                stdout=None if self._writes_events else subprocess.DEVNULL,
                stderr=their_reports,
                start_new_session=True,  # Ctrl-C is the program's
            )
        finally:
            os.close(their_orders)
            os.close(their_reports)
        self._process = process
        if self._stop_at is not None:  # asked to stop before there was anybody to tell
            self._tell(Order(stop_at=self._stop_at - _GOODBYE_S))
        return process

    def _listen(self, process: subprocess.Popen[bytes]) -> str:
        """Take in reports until the helper ends; what else it wrote, such as a traceback."""
        words, rest = "", b""
        while (reports := self._reports) is not None:
            # A child forked while the helper was started may keep the other end open for ever.
            if not select.select([reports], [], [], _LOOK_S)[0]:
                if process.poll() is None:
                    continue
                break
            data = os.read(reports, 65536)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                words = (words + self._heard(line))[-4 * _LAST_WORDS :]
        return f"status {process.wait()} {words}".strip()

    def _heard(self, line: bytes) -> str:
        """Take in a report; what is none is handed back."""
        try:
            report = msgspec.json.decode(line, type=Report)
        except msgspec.DecodeError:
            return line.decode("utf-8", "replace") + "\n"
        if report.health is not None:
            self._health = report.health
        if report.message is not None:
            logger.log(report.level, "%s", report.message)
        if report.left is not None:
            self._left = report.left
        return ""

    def _let_go(self) -> None:
        """Close the pipes to a helper that has ended."""
        self._close_orders()
        reports, self._reports = self._reports, None
        if reports is not None:
            os.close(reports)


# --- in the helper ------------------------------------------------------------------------------


def main() -> int:
    """The helper: read orders, forward, report. Returns its exit status."""
    helper = _Helper(sys.stdin.fileno(), sys.stderr.fileno())
    # A batch system tells every process of the job; this one ends when its parent has.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return helper.run()


class _Helper:
    def __init__(self, orders: int, reports: int) -> None:
        self._orders, self._reports = orders, reports
        self._buffer = b""
        os.set_blocking(reports, False)
        logger.handlers[:] = [_Handler(self.report)]
        logger.propagate = False

    def run(self) -> int:
        waiting: list[Order] = []  # the order to stop may have come with the first one
        while not waiting:
            read = self._read(_LOOK_S)
            if read is None:
                return 1
            waiting = read
        order = waiting.pop(0)
        root = Path(order.root or ".")
        guard = Guard()
        forwarder = Forwarder(
            [root],
            [connect(spec, guard) for spec in order.destinations],
            guard=guard,
            max_bytes=order.max_bytes,
        )
        forwarder.start()
        shown: list[dict[str, Any]] = []
        while True:
            orders = waiting or self._read(_LOOK_S)
            waiting = []
            # A forked child of the program may keep our input open after the program has died.
            if orders is None or os.getppid() != order.parent:
                self._wait_for_the_end_of(order.parent)
                close_dead_writers(root, guard)
                forwarder.stop(order.exit_budget)
                return 0
            for one in orders:
                if one.stop_at is not None:
                    left = forwarder.stop(max(0.0, one.stop_at - time.monotonic()))
                    self.report(Report(health=forwarder.health()))
                    self.report(Report(left=left))
                    return 0
                forwarder.wake()
            health = forwarder.health()
            if health != shown:
                shown = health
                self.report(Report(health=health))

    @staticmethod
    def _wait_for_the_end_of(parent: int) -> None:
        """A dying process closes its pipes and its locks one after the other, and is gone last."""
        until = time.monotonic() + _LOOK_S
        while os.getppid() == parent and time.monotonic() < until:
            time.sleep(_WAIT_S)

    def _read(self, timeout: float) -> list[Order] | None:
        """The orders that came within ``timeout`` seconds; None when no more will come."""
        ready, _, _ = select.select([self._orders], [], [], timeout)
        if not ready:
            return []
        data = os.read(self._orders, 65536)
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [msgspec.json.decode(line, type=Order) for line in lines if line]

    def report(self, report: Report) -> None:
        """One line to the parent; left out where nobody reads."""
        with contextlib.suppress(OSError):
            os.write(self._reports, msgspec.json.encode(report) + b"\n")


class _Handler(logging.Handler):
    """Hands log lines to the program's own logging."""

    def __init__(self, report: Any) -> None:  # noqa: ANN401 - a bound method
        super().__init__()
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        self._report(Report(level=record.levelno, message=record.getMessage()))


if __name__ == "__main__":
    sys.exit(main())
