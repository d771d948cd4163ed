"""The queue of one webhook and the thread that empties it: one POST a finding, again if need be."""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from cirron_otel.destinations.base import RetryAfter
from cirron_otel.destinations.http import HttpAnswer, HttpClient
from cirron_otel.destinations.retrying import ABOUT_THE_RECEIVER, asked_s, back_off_s
from cirron_otel.destinations.tls import Tls
from cirron_otel.findings import Finding, sentence

if TYPE_CHECKING:
    from cirron_otel._guard import Guard

#: Findings that may wait; later ones are counted and dropped, as the first ones name the cause.
LIMIT: Final = 256
_SOURCE = "cirron-otel"
_THREAD = "cirron-otel-webhook"
_LONGEST_PAUSE_IN_A_HURRY_S = 0.5
#: A finding that is older than that helps nobody.
_TOO_OLD_S = 3600.0
#: How often a finding is tried at which the receiver itself fails.
_TRIES = 8
_ANSWERED, _REFUSED, _SERVER_FAILED = 200, 300, 500

Body = Callable[[Finding], object]


class Post(NamedTuple):
    """A finding on its way, with what was true when it was found."""

    finding: Finding
    run: dict[str, object] | None
    guard: Guard
    found_at: float


class Counts(msgspec.Struct):
    """What became of the findings so far."""

    delivered: int = 0
    failures: int = 0
    lost: int = 0
    last_error: str | None = None
    last_success_ns: int | None = None


class Sender(NamedTuple):
    """How a finding is posted."""

    url: str
    headers: dict[str, str]
    body: Body | None
    timeout: float
    certificate: str | None

    def connect(self) -> HttpClient:
        """A client of its own for one thread."""
        return HttpClient(self.url, timeout=self.timeout, tls=Tls(ca=self.certificate))

    def encode(self, post: Post) -> bytes:
        """The request's body; raises what the user's ``body`` raises."""
        made = _body_of(post) if self.body is None else self.body(post.finding)
        return made if isinstance(made, bytes) else msgspec.json.encode(made, enc_hook=str)

    def post(self, client: HttpClient, data: bytes) -> HttpAnswer | RetryAfter:
        """One try. Blocks as long as the timeouts allow."""
        headers = {"Content-Type": "application/json", "User-Agent": _SOURCE, **self.headers}
        return client.request("POST", self.url, headers=headers, body=data)


class Line:
    """A queue and the thread that empties it, in one process, up to one end."""

    def __init__(self, sender: Sender, counts: Counts, description: str) -> None:
        self._over = False
        self._sender = sender
        self._counts = counts
        self._description = description
        # Its put() may be called again from a signal handler while it runs.
        self._queue: queue.SimpleQueue[Post | None] = queue.SimpleQueue()
        self._current: Post | None = None
        self._bell = threading.Event()
        self._thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)
        self._unstarted = [self._thread]
        self._hurry = False
        self._deadline: float | None = None
        self._random = random.Random()  # noqa: S311 - jitter; not the user's generator
        self._failures_in_a_row = 0

    # --- from other threads ---------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, once, whoever comes first."""
        with contextlib.suppress(IndexError):
            thread = self._unstarted.pop()
            try:
                thread.start()
            except RuntimeError:  # the interpreter is shutting down: all is lost, and counted
                self._over = True

    def is_over(self) -> bool:
        """Whether it has ended, or could not begin."""
        return self._over

    @property
    def waiting(self) -> int:
        """Findings that were not sent yet."""
        return self._queue.qsize() + (self._current is not None)

    def put(self, post: Post) -> None:
        """Leave a finding to the thread."""
        if self.is_over():
            self._lost(post, "webhook_not_sent")
        elif self._queue.qsize() >= LIMIT:
            self._lost(post, "webhook_queue_full")
        else:
            self._queue.put(post)

    def hurry(self) -> None:
        """Pauses are short from now on."""
        self._hurry = True
        self._bell.set()

    def end(self, deadline: float) -> None:
        """Empty the queue until the deadline; what is left then is counted."""
        self._deadline = deadline
        self._queue.put(None)
        self.hurry()
        if self._thread.is_alive():
            self._thread.join(max(0.0, deadline - time.monotonic()))
        self._over = True
        self._bell.set()
        left = [self._current] if self._thread.is_alive() else []
        with contextlib.suppress(queue.Empty):
            while True:
                left.append(self._queue.get_nowait())
        unsent = [post for post in left if post is not None]
        for post in unsent:
            self._lost(post, "webhook_not_sent")
        if unsent:
            why = self._counts.last_error or "there was no time"
            unsent[0].guard.repeat_warning(
                f"webhook end {self._description}",
                f"{self._description}: {len(unsent)} of the findings could not be sent ({why}); "
                "the spool has them",
            )
        if self._thread.is_alive():
            self._queue.put(None)  # the one that was there may be among those just taken out

    # --- on the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        client: HttpClient | None = None
        while not self.is_over() and (post := self._queue.get()) is not None:
            self._current = post
            try:
                if client is None:
                    client = self._sender.connect()
                self._deliver(client, post)
            except Exception as error:  # noqa: BLE001 - the next finding may do
                self._give_up(post, "webhook_rejected", f"it cannot be sent: {error!r}")
            self._current = None
        if client is not None:
            client.close()

    def _deliver(self, client: HttpClient, post: Post) -> None:
        data = self._sender.encode(post)
        tries = 0
        while not self.is_over():
            answer = self._sender.post(client, data)
            if self.is_over():  # it was counted as lost
                return
            status = answer.status
            if status is not None and _ANSWERED <= status < _REFUSED:
                self._failures_in_a_row = 0
                self._counts.delivered += 1
                self._counts.last_success_ns = time.time_ns()
                return
            tries += 1
            reason, asked = _reason_of(answer)
            if not _is_for_later(status):
                self._give_up(post, "webhook_rejected", reason)
                return
            is_its_own_fault = status is not None and status not in ABOUT_THE_RECEIVER
            too_old = time.monotonic() - post.found_at > _TOO_OLD_S
            if too_old or (is_its_own_fault and tries >= _TRIES):
                self._give_up(post, "webhook_gave_up", reason)
                return
            self._failed(post, f"{reason}; it is tried again")
            if not self._pause(asked):
                return

    def _pause(self, asked: float | None) -> bool:
        """Wait before the next try; False where the end comes first."""
        if asked is None:
            seconds = back_off_s(self._failures_in_a_row, self._random)
        else:
            seconds = asked_s(asked, self._random)
        until = time.monotonic() + seconds
        while not self.is_over():
            now = time.monotonic()
            if self._hurry and asked is None:
                until = min(until, now + _LONGEST_PAUSE_IN_A_HURRY_S)
            elif self._deadline is not None and until > self._deadline:
                # Nothing can be sent any more: whoever waits for the end need not.
                self._queue.put(self._current)
                return False
            if now >= until:
                return True
            if self._bell.wait(until - now):
                self._bell.clear()
                if self._hurry and asked is None:
                    return True
        return False

    def _failed(self, post: Post, reason: str) -> None:
        self._counts.failures += 1
        self._failures_in_a_row += 1
        self._counts.last_error = reason
        post.guard.repeat_warning(f"webhook {self._description}", f"{self._description}: {reason}")

    def _give_up(self, post: Post, why: str, reason: str) -> None:
        self._failed(post, f"{reason}; the spool has the finding, it is not tried again")
        self._lost(post, why)

    def _lost(self, post: Post, why: str) -> None:
        self._counts.lost += 1
        post.guard.lost(why)


# --- words ------------------------------------------------------------------------------------


def _body_of(post: Post) -> dict[str, object]:
    finding, run = post.finding, post.run
    where = "" if run is None else f" [run {run['id']}, rank {run['rank']}]"
    event = {
        "kind": finding.kind,
        "severity": finding.severity,
        "message": finding.message,
        "layer": finding.layer,
        "step": finding.step,
        "attributes": finding.attributes,
    }
    return {"source": _SOURCE, "text": sentence(finding) + where, "event": event, "run": run}


def _reason_of(answer: HttpAnswer | RetryAfter) -> tuple[str, float | None]:
    """Why it was not taken, for people, and the seconds that the receiver asks for."""
    if isinstance(answer, RetryAfter):
        return answer.reason, answer.seconds
    said = f": {answer.text}" if answer.text else ""
    return f"it answered {answer.status}{said}", answer.retry_after


def _is_for_later(status: int | None) -> bool:
    return status is None or status >= _SERVER_FAILED or status in ABOUT_THE_RECEIVER
