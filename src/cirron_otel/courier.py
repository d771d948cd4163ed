"""One destination's thread: which batch next, when to try again, what to do with the answer."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cirron_otel._guard import Guard
from cirron_otel.destinations.base import (
    Accepted,
    Answer,
    Destination,
    Listening,
    Measured,
    Omitting,
    Parcel,
    Rejected,
    RetryAfter,
    TooLarge,
)
from cirron_otel.destinations.rejected import set_aside
from cirron_otel.destinations.retrying import ABOUT_THE_RECEIVER, asked_s, back_off_s
from cirron_otel.errors import SpoolError, SpoolFormatError
from cirron_otel.lanes import Lane, Listing

THREAD_PREFIX = "cirron-otel-to-"
#: While somebody waits for the end, pauses of our own are no longer than this.
_LONGEST_PAUSE_IN_A_HURRY_S = 1.0
#: After so many refusals of one batch the others are tried first.
_TRIES_IN_A_ROW = 4
_DEFERRED_S = 60.0
_LONGEST_DEFERRED_S = 900.0
#: The same where there was no answer: it may be the batch at which the receiver falls over, but
#: most often it is an outage, after which nothing should have to wait for long.
_DEFERRED_UNANSWERED_S = 30.0
#: Answers that speak of the receiver, or of whether it knows us, and not of the batch.
_ABOUT_THE_RECEIVER = ABOUT_THE_RECEIVER | {401, 402, 403, 404, 407}
#: A place that another process holds is asked for this often.
_TAKE_S = 1.0
_TAKE_IN_A_HURRY_S = 0.05
#: How long one waits for another process that delivers and gets nowhere, unless told otherwise.
_OTHERS_S = 1.0


def no_health(name: str, description: str) -> dict[str, Any]:
    """What ``ci.health()["destinations"]`` says of a destination before anything is known."""
    return {
        "name": name,
        "description": description,
        "state": "starting",
        "queue_batches": 0,
        "queue_bytes": 0,
        "queue_age_s": 0.0,
        "delivered": 0,
        "delivered_bytes": 0,
        "rejected": 0,
        "refused_rows": 0,
        "gone_undelivered": 0,
        "left_out_spans": 0,
        "forgotten_marks": 0,
        "failures": 0,
        "last_error": None,
        "last_success_ns": None,
    }


class Courier:
    """Delivers to one destination from any number of directories, the oldest batch first.

    All work is done on its own thread, a daemon; :meth:`watch`, :meth:`start`, :meth:`wake`,
    :meth:`drain` and :meth:`end` only leave word and never block.
    """

    def __init__(
        self,
        destination: Destination,
        *,
        guard: Guard,
        poll_s: float,
        each_turn: Callable[[], object],
    ) -> None:
        """Start nothing. ``each_turn`` is called on the thread, often."""
        self.destination = destination
        self.delivered = 0
        self.delivered_bytes = 0
        self.rejected = 0
        self.refused_rows = 0
        self.failures = 0
        self.last_error: str | None = None
        self.last_success_ns: int | None = None
        self.state = "idle"
        #: The last drain whose end was reached, and where it found nothing more to send.
        self.drained = 0
        self._emptied: list[Lane] = []
        self._guard = guard
        self._poll_s = poll_s
        self._each_turn = each_turn
        self._lanes: list[Lane] = []
        self._wanted = 0
        self._deadline: float | None = None
        self._ending = False
        self._woken = 0
        self._bell = threading.Event()
        self._thread: threading.Thread | None = None
        self._random = random.Random()  # noqa: S311 - jitter; not the user's generator
        self._failures_in_a_row = 0
        #: How often each of the batches that are refused was tried.
        self._tries: dict[str, int] = {}
        self._parts: tuple[str, list[Parcel]] = ("", [])
        self._part_rejected = False
        self._take_again = 0.0
        self._others = (math.inf, 0.0)
        self._others_s = _OTHERS_S
        #: While somebody waits for the end: batches that other processes have to deliver in our
        #: places, and who these are.
        self.elsewhere = 0
        self.holders: tuple[str, ...] = ()
        #: Batches that other processes were seen to settle in our places while we waited for them.
        self.settled_elsewhere = 0
        if isinstance(destination, Measured):
            destination.measure = lambda: {**self.health(), "losses": dict(guard.losses)}

    # --- from other threads ---------------------------------------------------------------------

    def watch(self, listing: Listing) -> None:
        """Deliver from one more directory."""
        self._lanes = [*self._lanes, Lane(listing, self.destination.name)]

    def start(self) -> None:
        """Start the thread; where none can be started any more, the spool keeps everything."""
        self._thread = threading.Thread(
            target=self._run, name=f"{THREAD_PREFIX}{self.destination.name}", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is shutting down
            self._thread = None

    def wake(self) -> None:
        """Look for new batches now; a pause after a refusal is waited out all the same."""
        self._bell.set()

    def drain(self, deadline: float | None, patience: float | None = None) -> int:
        """Deliver all that is there now; :attr:`drained` reaches the number when that is done.

        Also when nothing more can be done before ``deadline``. A pause of our own ends at once.
        Another process that delivers and gets nowhere is waited for for ``patience`` seconds.
        """
        self._woken += 1
        self._deadline = deadline
        self._others = (math.inf, 0.0)
        self._others_s = _OTHERS_S if patience is None else patience
        self._emptied = []
        self._wanted += 1
        if not self.alive:
            self.drained = self._wanted
        self.wake()
        return self._wanted

    def end(self) -> None:
        """End the thread after what it is doing now."""
        self._ending = True
        self._bell.set()

    def join(self, timeout: float) -> None:
        """Wait for the end of the thread."""
        if self._thread is not None:
            self._thread.join(timeout)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def settled(self) -> int:
        """Batches delivered or set aside by this object."""
        return self.delivered + self.rejected

    @property
    def waiting(self) -> int:
        """Batches that wait, as far as is known."""
        return sum(lane.batches for lane in self._lanes)

    @property
    def bytes_waiting(self) -> int:
        """Their bytes."""
        return sum(lane.bytes for lane in self._lanes)

    def count_left(self, *, others: bool) -> int:
        """Batches of the last listings that are not settled, where it is ours to settle them.

        With ``others`` also where another process delivers. After a drain that sent all there was
        nothing is left: what other processes have written since, they see to themselves.
        """
        return sum(
            lane.unsettled()
            for lane in self._lanes
            if (lane not in self._emptied if lane.cursor.held else others)
        )

    def health(self) -> dict[str, Any]:
        """What ``ci.health()["destinations"]`` says of this destination."""
        oldest = [ns for lane in self._lanes if (ns := lane.oldest_ns()) is not None]
        return {
            **no_health(self.destination.name, self.destination.description),
            "state": self.state,
            "queue_batches": self.waiting,
            "queue_bytes": self.bytes_waiting,
            "queue_age_s": max(0.0, (time.time_ns() - min(oldest)) / 1e9) if oldest else 0.0,
            "delivered": self.delivered,
            "delivered_bytes": self.delivered_bytes,
            "rejected": self.rejected,
            "refused_rows": self.refused_rows,
            "gone_undelivered": sum(lane.gone for lane in self._lanes),
            **(self.destination.omitted() if isinstance(self.destination, Omitting) else {}),
            "failures": self.failures,
            "last_error": self.last_error,
            "last_success_ns": self.last_success_ns,
        }

    def after_fork(self) -> None:
        """In a forked child: close what holds the parent's place. Connections are left alone."""
        for lane in self._lanes:
            lane.cursor.close_in_child()
        if isinstance(self.destination, Listening):
            self.destination.close_in_child()
        self._thread = None

    # --- on the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ending:
                try:
                    self._turn()
                except Exception as error:  # noqa: BLE001 - the thread is supervised
                    self._guard.swallowed["forwarder"] += 1
                    self._failed(f"internal error: {error!r}")
                    self._pause(self._back_off())
        finally:
            self.state = "stopped"
            for lane in self._lanes:
                lane.release()
            try:
                self.destination.close()
            except Exception:  # noqa: BLE001 - nothing is sent any more
                self._guard.swallowed[f"destination {self.destination.name}"] += 1

    def _turn(self) -> None:
        """Deliver the oldest batch, or wait for one."""
        wanted = self._wanted
        hurry = wanted > self.drained
        found = self._next(hurry=hurry, relist=False)
        if found is None and hurry:
            found = self._next(hurry=True, relist=True)
        self._each_turn()
        if found is not None:
            self._deliver(*found)
            return
        held = all(lane.cursor.held or not lane.listing.sizes for lane in self._lanes)
        self.state = "idle" if held else "elsewhere"
        if held:
            self.elsewhere, self.holders = 0, ()
        if hurry and (held or self._others_are_done()):
            self._emptied = [lane for lane in self._lanes if lane.cursor.held]
            self.drained = wanted
            hurry = False
        self._wait(self._poll_s if not hurry else min(self._poll_s, _TAKE_IN_A_HURRY_S))

    def _next(self, *, hurry: bool, relist: bool) -> tuple[Lane, str] | None:
        now = time.monotonic()
        take = now >= self._take_again or hurry
        best: tuple[Lane, str] | None = None
        for lane in self._lanes:
            lane.listing.refresh(force=relist)
            if not lane.cursor.held and not (take and self._take(lane)):
                continue
            held_in_memory = Path(self._parts[0])
            of_this_lane = held_in_memory.parent == lane.listing.directory
            lane.update(held_in_memory.name if of_this_lane else None)
            name = lane.first(hurry=relist)
            if name is not None and (best is None or name < best[1]):
                best = (lane, name)
        return best

    def _take(self, lane: Lane) -> bool:
        # No directory is made where nothing was recorded: another program's may come there.
        if not lane.listing.sizes:
            return False
        self._take_again = time.monotonic() + _TAKE_S
        try:
            return lane.take()
        except SpoolError as error:
            self._failed(str(error))
            return False

    def _others_are_done(self) -> bool:
        """Whether the processes that hold our other places have delivered all, or get nowhere."""
        theirs = {lane: lane.left_to_others() for lane in self._lanes if not lane.cursor.held}
        self.elsewhere = left = sum(theirs.values())
        holders = dict.fromkeys(lane.cursor.holder() for lane, count in theirs.items() if count)
        self.holders = tuple(filter(None, holders))
        now = time.monotonic()
        before, since = self._others
        if left < before:
            if before != math.inf:
                self.settled_elsewhere += int(before) - left
            self._others = before, since = left, now
        return left == 0 or now - since >= self._others_s

    def _deliver(self, lane: Lane, name: str) -> None:
        parts = self._parts_of(lane, name)
        while parts and not self._ending:
            parcel = parts[-1]
            self.state = "sending"
            answer = self._send(parcel)
            if isinstance(answer, TooLarge):
                halves = parcel.halves()
                if halves:
                    parts[-1:] = reversed(halves)
                    continue
                text = answer.answer or "one row alone is more than the receiver takes"
                answer = Rejected(answer.status, text)
            if isinstance(answer, Rejected):
                if not self._put_aside(lane, parcel, answer):
                    return
                self._part_rejected = True
            elif isinstance(answer, RetryAfter):
                self._refused(lane, name, answer)
                return
            else:
                self._accepted(answer)
            parts.pop()
            self._tries.pop(name, None)
        if not parts:
            self._finish(lane, name)

    def _parts_of(self, lane: Lane, name: str) -> list[Parcel]:
        """What is still to be sent of a batch; in memory is one batch at a time."""
        path = lane.listing.directory / name
        key = str(path)
        if self._parts[0] != key:
            self._parts = (key, [])
            self._part_rejected = False
            try:
                self._parts[1].append(Parcel.read(path))
            except FileNotFoundError:
                lane.vanished(name)
                self._tries.pop(name, None)
                self._parts = ("", [])
            except OSError as error:
                self._parts = ("", [])
                why = f"cannot read {name}: {error.strerror}"
                self._refused(lane, name, RetryAfter(None, why), about_batch=True)
        return self._parts[1]

    def _finish(self, lane: Lane, name: str) -> None:
        if self._parts[0] != str(lane.listing.directory / name):
            return  # it could not be read
        size = lane.size_of(name)
        if not lane.settle(name, "rejected" if self._part_rejected else "sent"):
            self._tell(
                f"what it has cannot be noted in {lane.cursor.path} (a full disk?): it is noted "
                "later, or else sent again, under the same ids",
                "cursor",
            )
        if self._part_rejected:
            self.rejected += 1
        else:
            self.delivered += 1
            self.delivered_bytes += size
        self._parts = ("", [])
        self._tries.pop(name, None)

    def _send(self, parcel: Parcel) -> Answer:
        try:
            return self.destination.send(parcel)
        except SpoolFormatError as error:
            return Rejected(None, f"not a batch: {error}")
        except Exception as error:  # noqa: BLE001 - a destination's bug must not end the delivery
            self._guard.swallowed[f"destination {self.destination.name}"] += 1
            return RetryAfter(None, f"internal error: {error!r}", status=500)

    def _accepted(self, answer: Accepted) -> None:
        self._failures_in_a_row = 0
        self.last_success_ns = time.time_ns()
        self.refused_rows += answer.refused_rows
        if answer.note or answer.refused_rows:
            self.last_error = answer.note or f"{answer.refused_rows} rows refused"
            self._tell(f"took a batch, but says: {self.last_error}", "note")
        else:
            self.last_error = None

    def _put_aside(self, lane: Lane, parcel: Parcel, answer: Rejected) -> bool:
        self._failures_in_a_row = 0
        try:
            set_aside(lane.listing.directory, parcel, answer, self.destination)
        except SpoolError as error:
            why = RetryAfter(None, str(error))
            self._refused(lane, parcel.path.name, why, about_batch=True)
            return False
        status = "" if answer.status is None else f" with {answer.status}"
        self.last_error = f"refused a batch{status}: {answer.answer}"
        self._tell(f"{self.last_error} (set aside in spool/rejected)", "rejected")
        return True

    def _refused(
        self, lane: Lane, name: str, answer: RetryAfter, *, about_batch: bool = False
    ) -> None:
        """Wait before the next try; let others go first where only this batch is refused."""
        self._failed(answer.reason, told=answer.told)
        if answer.status is not None:
            about_batch = answer.status not in _ABOUT_THE_RECEIVER
        unanswered = answer.status is None and answer.seconds is None and not about_batch
        if answer.moved:
            self._tries.pop(name, None)
        tries = self._tries[name] = self._tries.get(name, 0) + 1
        rounds, rest = divmod(tries, _TRIES_IN_A_ROW)
        if about_batch and not rest:
            seconds = _DEFERRED_S * 2.0 ** min(rounds - 1, 10)
            self._defer(lane, name, min(seconds, _LONGEST_DEFERRED_S))
        elif unanswered and not rest and sum(one.ready for one in self._lanes) > 1:
            self._defer(lane, name, _DEFERRED_UNANSWERED_S)
        self.state = "retrying"
        if answer.seconds is None:
            self._pause(self._back_off())
        else:
            self._pause(asked_s(answer.seconds, self._random), asked=True)

    def _defer(self, lane: Lane, name: str, seconds: float) -> None:
        lane.defer(name, seconds)
        self._parts = ("", [])

    def _failed(self, reason: str, *, told: bool = False) -> None:
        self.failures += 1
        self._failures_in_a_row += 1
        self.last_error = reason
        if not told:
            self._tell(f"{reason}; the spool keeps everything and it is tried again", "retry")

    def _tell(self, message: str, kind: str) -> None:
        text = f"{self.destination.description}: {message}"
        self._guard.repeat_warning(f"deliver {kind} {self.destination.name}", text)

    def _back_off(self) -> float:
        return back_off_s(self._failures_in_a_row, self._random)

    def _pause(self, seconds: float, *, asked: bool = False) -> None:
        """Wait before the next try; one of our own pauses ends when somebody wants a drain.

        Where the receiver asked for more time than there is, nothing more can be done.
        """
        until = time.monotonic() + seconds
        woken = self._woken
        while not self._ending:
            now = time.monotonic()
            hurry, deadline = self._wanted > self.drained, self._deadline
            if hurry and asked and deadline is not None and until > deadline:
                self.drained = self._wanted
            if not asked:
                if self._woken != woken:
                    return
                if hurry:
                    until = min(until, now + _LONGEST_PAUSE_IN_A_HURRY_S)
            if now >= until:
                return
            self._wait(until - now)

    def _wait(self, seconds: float) -> None:
        if self._bell.wait(seconds):
            self._bell.clear()
