"""Telling of a rank that does not move: to its user, and to the other ranks before that.

What counts as a hang is :mod:`cirron_otel.run.watchdog`'s to say, and who is to blame for it
:mod:`cirron_otel.run.heartbeat`'s.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cirron_otel import identity, semconv
from cirron_otel.context import attach_context, get_current
from cirron_otel.findings import Finding, report
from cirron_otel.run import heartbeat, watchdog

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder
    from cirron_otel.run.watchdog import Silence, Watchdog
    from cirron_otel.scope_base import BaseScope


class Hangs:
    """The word of one rank. On the flush thread, but for its last one.

    ``thread`` is the one that trains, ``steps`` the training steps that have ended, ``iteration``
    those that have begun.
    """

    def __init__(self, rec: Recorder, session: BaseScope, dog: Watchdog) -> None:
        self._rec = rec
        self._session = session
        self._watchdog = dog
        self._beat_s = 0.0
        # Often enough for a hang to find the others' word newer than itself.
        shortest = min(dog.thresholds.values(), default=heartbeat.INTERVAL_S)
        self._beat_every_s = min(heartbeat.INTERVAL_S, shortest / 4)

    def report(
        self,
        silence: Silence,
        scopes: Sequence[BaseScope],
        thread: int,
        steps: int,
        iteration: int,
    ) -> None:
        """Tell of a hang: in the scope that does not move, as if that had said it."""
        rec = self._rec
        now = rec.clock.now()
        self._beat_s = 0.0
        self.beat(scopes, thread, steps, iteration)
        ranks = ""
        if rec.settings.world_size > 1:
            beats = heartbeat.read(rec.spool.run_directory, rec.run_id, rec.settings.world_size)
            mine = next((beat.time_ns for beat in beats if beat.rank == rec.rank), now)
            ranks = heartbeat.described(beats, rec.settings.world_size, mine)
            ranks = ranks or "nothing is known of the other ranks"
        begun = max(0, iteration - 1)
        length_ns = self._watchdog.length_ns
        silent = silence._replace(since_ns=now - length_ns)
        finding = Finding(
            "hang",
            "critical",
            watchdog.message(silent, now, begun, rank=rec.rank, ranks=ranks),
            attributes={
                semconv.HANG_PHASE: silence.phase,
                semconv.HANG_SECONDS: round(length_ns / 1e9, 3),
                semconv.HANG_SCOPES: silence.where(),
                semconv.HANG_ITERATION: begun,
                semconv.HANG_RANKS: ranks,
                semconv.HANG_STACKS: watchdog.stacks(),
            },
        )
        before = get_current()
        context = silence.path[-1].ctx
        try:
            if context is not None:
                attach_context(context)
            report(rec, finding)
            self._watchdog.excuse(silence)
        finally:
            attach_context(before)

    def beat(self, scopes: Sequence[BaseScope], thread: int, steps: int, iteration: int) -> None:
        """Tell the other ranks where this one is, if it is time."""
        now = time.monotonic()
        if self._is_alone or now - self._beat_s < self._beat_every_s:
            return
        self._beat_s = now
        silence = watchdog.silence_of(scopes, thread, steps=steps)
        self._write(
            self._session.last_ns if silence is None else silence.since_ns,
            "" if silence is None else silence.where(),
            iteration,
            waits=silence is not None and watchdog.waits_for_others(thread, silence.path),
        )

    def ended(self, end_ns: int, outcome: str, iteration: int) -> None:
        """Tell the other ranks how this one has ended. On the thread that ends it."""
        if not self._is_alone:
            self._write(end_ns, "", iteration, outcome=outcome)

    @property
    def _is_alone(self) -> bool:
        settings = self._rec.settings
        return settings.world_size < 2 or "spool" not in settings.output  # noqa: PLR2004 - it takes two

    def _write(
        self, since_ns: int, where: str, iteration: int, *, waits: bool = False, outcome: str = ""
    ) -> None:
        rec = self._rec
        beat = heartbeat.Beat(
            rec.run_id, rec.rank, rec.run_state.attempt, identity.host_name(), os.getpid(),
            iteration, rec.clock.now(), since_ns, where, waits, outcome,
        )  # fmt: skip
        heartbeat.write(rec.spool.run_directory, beat)
