"""The one background thread of a process: it writes the spool and touches no network.

It is started lazily, by the first row a process records, and again in a forked child by that
child's first row. Nobody waits for it on a lock: callers set plain flags, release a raw lock that
serves as a bell, and poll a counter. That makes every method here safe in a signal handler.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

from cirron_otel._guard import Guard

_DEATHS_BEFORE_DEGRADING = 3
_DEATH_WINDOW_S = 60.0
_MAX_BACKOFF_S = 30.0
#: How often the one who waits for a flush looks: soon at first, for most take less than that.
_FIRST_POLL_S = 0.00005
_POLL_S = 0.001
THREAD_NAME = "cirron-otel-flush"


class FlushThread:
    """Calls ``flush()`` every ``interval`` seconds and whenever the bell rings.

    Supervised: a flush that dies is started again after a back-off that doubles (1 s, 2 s, ... at
    most 30 s); three deaths within a minute set ``degraded`` until the process restarts.
    """

    def __init__(self, interval: float, flush: Callable[[], None], guard: Guard) -> None:
        self.interval = interval
        self.degraded = False
        self.restarts = 0
        self.last_duration_ns = 0
        self._flush = flush
        self._guard = guard
        self._deaths: deque[float] = deque(maxlen=_DEATHS_BEFORE_DEGRADING)
        self.reset()

    def reset(self) -> None:
        """Forget the thread: in a forked child it does not exist."""
        self._bell = threading.Lock()
        self._bell.acquire()
        self._inline = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._begun = 0
        self._done = 0
        self._wanted = 0

    @property
    def waited_for(self) -> bool:
        """Whether somebody waits for the flush that runs now."""
        return self._wanted >= self._begun

    @property
    def begun(self) -> int:
        """Flushes begun so far."""
        return self._begun

    @property
    def done(self) -> int:
        """The last flush that was completed, counted as :attr:`begun` counts."""
        return self._done

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._is_alive()

    def _is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _must_stop(self) -> bool:
        return self._stopping

    @property
    def started(self) -> bool:
        """Whether the thread was ever started in this process."""
        return self._thread is not None

    def ensure(self) -> bool:
        """Start the thread if it is not running; False where no thread can be started any more."""
        if self.alive:
            return True
        if self._stopping:
            return False
        thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread = thread
        try:
            thread.start()
        except RuntimeError:  # the interpreter is shutting down
            self._thread = None
            return False
        return True

    def ring(self) -> None:
        """Have a flush begin soon. Never blocks."""
        with contextlib.suppress(RuntimeError):  # it has been rung already
            self._bell.release()

    def request(self, timeout: float) -> bool:
        """Have everything queued so far flushed; waits at most ``timeout`` seconds.

        Flushes on the calling thread where there is no flush thread. Says whether it was done.
        """
        if self._thread is threading.current_thread() or not self.alive:
            return self._flush_here(timeout)
        self._wanted = want = self._begun + 1
        self.ring()
        deadline = time.monotonic() + timeout
        pause = _FIRST_POLL_S
        while self._done < want:
            if not self._is_alive():
                return self._flush_here(max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S)
        return True

    def stop(self, timeout: float) -> bool:
        """End the thread after one last flush; waits at most ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        done = self.request(timeout)
        self._stopping = True
        self.ring()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return done

    def _flush_here(self, timeout: float) -> bool:
        if not self._inline.acquire(timeout=max(0.0, timeout)):
            return False
        try:
            self._begun += 1
            self._flush()
            self._done = self._begun
        finally:
            self._inline.release()
        return True

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._loop()
            except BaseException as error:  # noqa: BLE001 - the thread is supervised
                self._guard.swallowed["flush_thread"] += 1
                now = time.monotonic()
                self._deaths.append(now)
                recent = sum(now - death < _DEATH_WINDOW_S for death in self._deaths)
                self.degraded = self.degraded or recent >= _DEATHS_BEFORE_DEGRADING
                self.restarts += 1
                backoff = min(2.0 ** (recent - 1), _MAX_BACKOFF_S)
                self._guard.repeat_warning(
                    "flush_thread", f"flush thread died of {error!r}, again in {backoff:.0f} s"
                )
                self._bell.acquire(timeout=backoff)
                self.ring()  # the loop begins with a flush: somebody may be waiting for it

    def _loop(self) -> None:
        while not self._stopping:
            self._bell.acquire(timeout=self.interval)
            if self._must_stop():
                return
            with self._inline:
                self._begun += 1
                began = time.monotonic_ns()
                self._flush()
                self.last_duration_ns = time.monotonic_ns() - began
                self._done = self._begun
