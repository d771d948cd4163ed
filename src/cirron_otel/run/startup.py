"""What a training does before its first step, where that is seen: the scope ``startup``.

It lies in the session, from ``profile()`` to the first training step, and what is known of it lies
inside: a process group that is set up (``init``), modules that are made (``model``), worker
processes that a data loader starts (``loader``). Hooks note when each was begun and over; the rows
are made afterwards, on the flush thread, when there is a first step. Whatever else is recorded
meanwhile (a checkpoint that is loaded) stands beside it, where it was opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cirron_otel import semconv

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder
    from cirron_otel.scope_base import BaseScope

#: Parts of one kind that are nearer to each other are one: a model is made module by module.
TOGETHER_NS = 1_000_000_000
#: Parts that are kept; a program that makes more of them is doing something else.
MOST_PARTS = 100


class Startup:
    """The parts of one startup. :meth:`saw` on any thread, :meth:`tell` on one at a time."""

    def __init__(self, rec: Recorder, session: BaseScope, *, interactive: bool) -> None:
        self._rec = rec
        self._session = session
        self._parts: list[tuple[str, int, int]] = []
        #: Whether more may be seen. Between the cells of a notebook nothing starts up.
        self.is_going_on = not interactive

    def saw(self, name: str, start_ns: int, end_ns: int) -> None:
        """A part has been done; ns since the Unix epoch. Never raises, never waits."""
        if not self.is_going_on:
            return
        parts = self._parts
        if parts and parts[-1][0] == name and start_ns - parts[-1][2] < TOGETHER_NS:
            parts[-1] = (name, min(parts[-1][1], start_ns), max(parts[-1][2], end_ns))
        elif len(parts) < MOST_PARTS:
            parts.append((name, start_ns, end_ns))

    def tell(self, first_step_ns: int) -> None:
        """The first training step has begun then (0: none has): make the rows, once."""
        if not first_step_ns or not self.is_going_on:
            return
        self.is_going_on = False
        session, rec = self._session, self._rec
        parts = [part for part in self._parts if part[1] < first_step_ns]
        self._parts = []
        if not parts or not session.is_open:
            return
        scope = rec.make_scope(semconv.STARTUP, None, {})
        scope.auto = True
        if scope.open(parent=session, start_ns=session.start_ns, attach=False):
            scope.thread_id = session.thread_id
            for name, start_ns, end_ns in parts:
                scope.add_closed(name, max(start_ns, session.start_ns), min(end_ns, first_step_ns))
            scope.close(end_ns=first_step_ns, restore=False)
