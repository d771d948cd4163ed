"""Which channels of which layers were stuck, from which check to which, and for how long."""

from __future__ import annotations

from collections.abc import Sequence

from cirron_otel.training_record.report.lines import whole
from cirron_otel.training_record.report.model import (
    CERTIFIED,
    SILENT,
    STUCK_KINDS,
    Episode,
    Layer,
    Run,
    stuck_count,
)
from cirron_otel.training_record.report.thinning import Peaks

#: So many channels events and repairs are kept, for a record without metrics.
_EVENTS = 20_000
_NONE = [0] * len(STUCK_KINDS)


class StuckTracker:
    """Follows the counts of channels through a run and writes episodes and totals into it.

    The diary comes first (:meth:`note_event`, :meth:`note_repair`), then the rows of the metrics
    (:meth:`check`); where there are none, :meth:`replay_events` makes do with the diary.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._open: dict[str, Episode] = {}
        #: Steps at which a layer was repaired; a repair comes after that check's counts.
        self._repaired: dict[str, set[int]] = {}
        #: What the diary says of channels; None: a repair.
        self._events: list[tuple[int, Layer, list[int] | None]] = []
        self._since: int | None = None

    def note_event(self, step: int, layer: Layer, counts: list[int]) -> None:
        """Take the counts of a channels event."""
        if len(self._events) < _EVENTS:
            self._events.append((step, layer, counts))

    def note_repair(self, step: int, layer: Layer) -> None:
        """Take a repair."""
        if len(self._events) < _EVENTS:
            self._events.append((step, layer, None))
            self._repaired.setdefault(layer.name, set()).add(step)

    def check(self, step: int, column: int, rows: Sequence[tuple[Layer, object]]) -> None:
        """Take the counts of one check: a list of three or four per layer."""
        anywhere = False
        for layer, value in rows:
            if value == _NONE and layer.scanned and layer.stuck is None:
                # Nothing, as at every check before: nearly every layer of nearly every run.
                continue
            if isinstance(value, list):
                counts = [max(whole(item) or 0, 0) for item in value[: len(STUCK_KINDS)]]
                counts += [0] * (len(STUCK_KINDS) - len(counts))
                anywhere |= self._layer(layer, step, column, counts)
        self._time(step, stuck=anywhere)

    def _layer(self, layer: Layer, step: int, column: int | None, counts: list[int]) -> bool:
        """Take one layer's counts; whether it is stuck and stays so after this check."""
        now = stuck_count(counts)
        if not layer.scanned:
            layer.scanned = True
            layer.inherited = now
        layer.stuck_now = counts
        layer.peak_stuck = max(layer.peak_stuck, now)
        layer.peak_proven = max(layer.peak_proven, counts[CERTIFIED])
        layer.peak_silent = max(layer.peak_silent, counts[SILENT])
        if column is not None and (layer.stuck is not None or any(counts)):
            layer.stuck = layer.stuck or Peaks(len(STUCK_KINDS))
            layer.stuck.add(column, counts)
        beyond = now > layer.inherited
        if beyond and layer.name not in self._open:
            share = f" of {layer.channels}" if layer.channels else ""
            detail = f"{now}{share} channels"
            episode = self._open[layer.name] = Episode("stuck", layer.name, step, detail=detail)
            self.run.episodes.add(episode)
        if layer.name not in self._open:
            return False
        repaired = step in self._repaired.get(layer.name, ())
        if repaired or not beyond:
            self._close(layer.name, step, "repaired" if repaired else "cleared")
            return False
        return True

    def _close(self, layer: str, step: int, outcome: str) -> None:
        episode = self._open.pop(layer, None)
        if episode is not None:
            episode.end, episode.outcome = step, outcome

    def _time(self, step: int, *, stuck: bool) -> None:
        """Add up the steps at which any layer was stuck."""
        run = self.run
        if self._since is not None:
            run.steps_stuck += max(step - self._since, 0)
            seconds = run.clock.between(self._since, step)
            if seconds is not None:
                run.seconds_stuck = (run.seconds_stuck or 0.0) + seconds
        self._since = step if stuck else None

    def replay_events(self) -> None:
        """Make do with what the diary says, where there are no metrics."""
        now: dict[str, bool] = {}
        first = self.run.first_step or 0
        for step, layer, counts in self._events:
            if counts is None:
                self._close(layer.name, step, "repaired")
                now[layer.name] = False
            else:
                if not layer.scanned and step > first:
                    # No event at the first check: nothing was stuck then.
                    self._layer(layer, first, None, [0] * len(STUCK_KINDS))
                now[layer.name] = self._layer(layer, step, None, counts)
            self._time(step, stuck=any(now.values()))

    def finish(self) -> None:
        """What is still stuck is so to the end of the record."""
        end = self.run.steps
        if self._since is not None and end is not None:
            self._time(end, stuck=False)
