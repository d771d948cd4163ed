"""The forwarder: takes batches out of spools to destinations, each at its own pace.

One thread per destination, whatever the number of directories. It reads one batch file, has the
destination try, and settles it in the cursor; nothing else remembers anything, so it may be killed
at any moment. The same :class:`Forwarder` runs in the training's process, in a helper beside it,
and in ``cirron-otel forward`` and ``cirron-otel spool flush``.

At least once: a batch whose answer did not arrive is sent again under the same id.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cirron_otel._guard import Guard
from cirron_otel.courier import Courier
from cirron_otel.destinations.base import Destination
from cirron_otel.errors import SpoolError
from cirron_otel.lanes import Listing
from cirron_otel.recovery import recover
from cirron_otel.spool import MAX_FILES, Spool
from cirron_otel.version import VERSION

#: How often the directories are looked at (a ``stat`` each).
POLL_S = 0.5
#: How often somebody who waits looks whether it is done.
_WAIT_S = 0.005
#: How long threads that have nothing to send any more may take to end, and those that may hang.
_JOIN_S = 1.0
_JOIN_HANGING_S = 0.1
#: Why something is left where nothing has failed.
_WHY_LEFT = {"sending": "no answer yet", "elsewhere": "another process delivers there"}
#: Of the spool's cap: more than this undelivered, and the user is told once.
_NEARLY_FULL = 0.8


class Left(msgspec.Struct, frozen=True):
    """What a destination still lacks after a drain."""

    destination: str
    batches: int
    error: str | None = None


class Waiting(NamedTuple):
    """How far a drain is: batches that wait here, and those that other processes deliver."""

    here: int
    elsewhere: int
    #: Who these processes are, for people.
    holders: tuple[str, ...]


class Forwarder:
    """Sends every batch of the directories ``roots`` to every destination.

    It touches nothing before :meth:`start`, and may be started once. ``max_bytes`` is the cap of
    the spool, where it is known. The destinations are closed when it ends. Methods may be called
    from any one thread at a time, :meth:`health` from any.
    """

    def __init__(
        self,
        roots: Iterable[Path],
        destinations: Iterable[Destination],
        *,
        guard: Guard | None = None,
        max_bytes: int | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        """Touch no file and start no thread."""
        self.guard = guard or Guard()
        self._max_bytes = max_bytes
        #: As of a :class:`~cirron_otel.forward_process.ForwardProcess`; threads do not die.
        self.restarts = 0
        self._listings: dict[Path, Listing] = {}
        self._couriers = [
            Courier(
                destination,
                guard=self.guard,
                poll_s=poll_s,
                each_turn=self._warn_if_nearly_full,
            )
            for destination in destinations
        ]
        for root in roots:
            self.watch(root)

    def watch(self, root: Path) -> None:
        """Take in one more output directory; it need not exist yet."""
        root = root.absolute()
        if root in self._listings:
            return
        listing = self._listings[root] = Listing(root)
        for courier in self._couriers:
            courier.watch(listing)

    def start(self) -> None:
        """Start a thread per destination. Does not block."""
        for courier in self._couriers:
            courier.start()

    def wake(self) -> None:
        """Look for new batches now. Does not block."""
        for courier in self._couriers:
            courier.wake()

    def drain(
        self,
        timeout: float | None,
        *,
        patience: float | None = None,
        others: bool = False,
        progress: Callable[[Waiting], object] | None = None,
    ) -> list[Left]:
        """Deliver all that is there now; what could not be delivered, by destination.

        Waits at most ``timeout`` seconds (``None``: no limit), and with ``patience`` only as long
        as something is delivered every so many seconds. What another process delivers is waited
        for as long as it makes progress, and counted with ``others``. ``progress`` is told a few
        times a second what still waits.
        """
        now = time.monotonic()
        deadline = None if timeout is None else now + timeout
        numbers = [courier.drain(deadline, patience) for courier in self._couriers]
        least, moved, shown = None, now, 0.0
        while not all(c.drained >= n for c, n in zip(self._couriers, numbers, strict=True)):
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                break
            done = sum(one.settled + one.settled_elsewhere for one in self._couriers)
            if least is None or done > least:
                least, moved = done, now
            if patience is not None and now - moved >= patience:
                break
            if progress is not None and now - shown >= 0.1:  # noqa: PLR2004 - as the text says
                progress(self._waiting())
                shown = now
            time.sleep(_WAIT_S)
        return self._left(others=others)

    def _waiting(self) -> Waiting:
        couriers = self._couriers
        holders = dict.fromkeys(who for courier in couriers for who in courier.holders)
        return Waiting(
            sum(courier.waiting for courier in couriers),
            sum(courier.elsewhere for courier in couriers),
            tuple(holders),
        )

    def _left(self, *, others: bool) -> list[Left]:
        for listing in self._listings.values():
            listing.refresh(force=True)
        found = [
            Left(
                courier.destination.description,
                courier.count_left(others=others),
                courier.last_error or _why_left(courier),
            )
            for courier in self._couriers
        ]
        return [left for left in found if left.batches]

    def stop(self, timeout: float) -> list[Left]:
        """Drain for at most ``timeout`` seconds, then end; what is left stays in the spool.

        A thread that hangs in its destination is left behind: it is a daemon, and it ends, and
        notes what it was answered, when its destination gives up.
        """
        left = self.drain(timeout)
        for courier in self._couriers:
            courier.end()
        until = time.monotonic() + (_JOIN_HANGING_S if left else _JOIN_S)
        for courier in self._couriers:
            courier.join(max(0.0, until - time.monotonic()))
        return left

    @property
    def alive(self) -> bool:
        """Whether every destination has its thread."""
        return all(courier.alive for courier in self._couriers)

    def health(self) -> list[dict[str, Any]]:
        """The state of every destination; see ``docs/delivery.md``. Looks at no disk."""
        return [courier.health() for courier in self._couriers]

    def _warn_if_nearly_full(self) -> None:
        """Tell the user, once, that undelivered batches are about to be evicted."""
        if self._max_bytes is None:
            return
        full = max(
            max(courier.bytes_waiting / self._max_bytes, courier.waiting / MAX_FILES)
            for courier in self._couriers
        )
        if full >= _NEARLY_FULL:
            self.guard.warn(
                "nearly_full",
                f"the spool is {full:.0%} full of batches that are not delivered yet; when it is "
                "full the oldest leave undelivered (counted evicted_undelivered): bring the "
                "destination back, or raise spool_max_bytes",
            )

    def after_fork(self) -> None:
        """In a forked child: nothing of it runs there, and it keeps no place of its parent's."""
        for listing in self._listings.values():
            listing.after_fork()
        for courier in self._couriers:
            courier.after_fork()


def _why_left(courier: Courier) -> str | None:
    why = _WHY_LEFT.get(courier.state)
    if courier.state == "elsewhere" and courier.holders:
        return f"{why} ({', '.join(courier.holders)})"
    return why


def close_dead_writers(root: Path, guard: Guard) -> None:
    """Close what dead processes left open in an output directory, so that it is delivered.

    Removes nothing, whatever the caps are. Blocks as long as the disk does. Never raises.
    """
    spool = Spool(root, max_bytes=sys.maxsize, max_files=sys.maxsize)
    try:
        recover(spool, sdk_version=VERSION)
    except SpoolError as error:
        guard.repeat_warning("recover", str(error))


def describe_left(left: Sequence[Left], directory: Path) -> str | None:
    """One line for the user about what was not delivered, and how to send it; None for nothing."""
    if not left:
        return None
    parts = "; ".join(
        f"{one.batches:,} {'batch' if one.batches == 1 else 'batches'} to {one.destination}"
        + (f" ({one.error})" if one.error else "")
        for one in left
    )
    return (
        f"not delivered yet: {parts}. They stay in {directory}: the next run there sends them, "
        f"or `cirron-otel spool flush --dir {directory}`"
    )
