"""How a recording ended, in one word, and what it ended by. Pure."""

from __future__ import annotations

from typing import NamedTuple

from cirron_otel import semconv

RUNNING = "running"
COMPLETED = "completed"
FAILED = "failed"
INTERRUPTED = "interrupted"
PREEMPTED = "preempted"
#: Said by readers only, of a process that is gone without a word.
LOST = "lost"
_BY_SIGNAL = {"SIGINT": INTERRUPTED, "SIGTERM": PREEMPTED}
#: What shells and launchers make of a process that ended by a signal.
_SIGNAL_STATUS = {130: "SIGINT", 143: "SIGTERM"}


class Outcome(NamedTuple):
    """The word, and what is known of why: a type of exception, the name of a signal."""

    word: str
    error_type: str | None = None
    signal: str | None = None

    def attributes(self) -> dict[str, str]:
        """The outcome as attributes of the session."""
        found = {semconv.RUN_OUTCOME: self.word}
        if self.error_type is not None:
            found[semconv.ERROR_TYPE] = self.error_type
        if self.signal is not None:
            found[semconv.RUN_SIGNAL] = self.signal
        return found


class Ending:
    """What has happened that says how it ends. Any thread, also a signal handler: plain fields."""

    def __init__(self) -> None:
        #: The signal that came last, and the iteration at which it came.
        self.signal: str | None = None
        self._signal_iteration = 0
        #: The status that the program asked to end with, and the iteration then.
        self._status: object = None
        self._status_iteration = -1

    def signalled(self, name: str, iteration: int) -> None:
        """A signal came that ends programs."""
        self.signal, self._signal_iteration = name, iteration

    def exiting(self, status: object, iteration: int) -> None:
        """The program asked to end with this status, as ``sys.exit`` takes it."""
        self._status, self._status_iteration = status, iteration

    def outcome(self, error: BaseException | None, iteration: int) -> Outcome:
        """How it ends; ``error`` is what flies out of the program, if anything does."""
        if isinstance(error, SystemExit):
            self.exiting(error.code, iteration)
            error = None
        if isinstance(error, KeyboardInterrupt):
            return Outcome(INTERRUPTED, None, self.signal or "SIGINT")
        signal = self.signal
        # Who catches Ctrl-C and goes on training was not interrupted; after SIGTERM a program may
        # well go on to the end of its epoch, in order to save.
        if signal == "SIGINT" and iteration > self._signal_iteration + 1:
            signal = None
        if error is not None:
            word = PREEMPTED if signal == "SIGTERM" else FAILED
            return Outcome(word, type(error).__qualname__, signal)
        if signal is not None:
            return Outcome(_BY_SIGNAL.get(signal, INTERRUPTED), None, signal)
        return self._by_status(iteration)

    def _by_status(self, iteration: int) -> Outcome:
        status = self._status if iteration <= self._status_iteration + 1 else None
        if type(status) is int and status in _SIGNAL_STATUS:
            signal = _SIGNAL_STATUS[status]
            return Outcome(_BY_SIGNAL[signal], None, signal)
        if self._status_iteration >= 0 and status not in (None, 0, False):
            return Outcome(FAILED, "SystemExit")
        return Outcome(COMPLETED)
