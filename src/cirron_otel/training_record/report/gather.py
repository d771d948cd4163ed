"""One pass over the diary, one over the metrics: a :class:`Run` in bounded memory.

Reads any record, also an unfinished, damaged, pre-schema or foreign one. What it cannot make sense
of it passes over; whether the record may be believed is the verifier's business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path

from cirron_otel.errors import RecordError
from cirron_otel.training_record.chain import DIARY, METRICS
from cirron_otel.training_record.checking import verify
from cirron_otel.training_record.report import words
from cirron_otel.training_record.report.event_lines import event_of, finite
from cirron_otel.training_record.report.lines import Reading, number, objects, text, whole
from cirron_otel.training_record.report.model import (
    LANES,
    Episode,
    Event,
    Layer,
    Run,
    Spike,
    stuck_count,
)
from cirron_otel.training_record.report.rows import RowTaker
from cirron_otel.training_record.report.stuck_tracker import StuckTracker
from cirron_otel.training_record.report.thinning import Marks

#: More layers than this are counted, not followed.
MAX_LAYERS = 2048
_MINOR = frozenset({"skipped_step", "certificate_refused", "loss_reduced"})
#: Where an event is silent about its severity; the others are information.
_SEVERITY_OF = {"sink_error": "warning"}
#: Signs of trouble that may come before a loss spike.
_SIGNS = frozenset({"alarm", "channels", "certificate"})
#: A sign counts as a warning of a spike at most so many checks before it.
_LEAD_CHECKS = 20
_LIST = 16


def load(
    path: str | Path,
    *,
    key: bytes | str | Path | None = None,
    verdict: Mapping[str, object] | None = None,
) -> Run:
    """Gather the record in ``path``: a run directory, or a diary file.

    ``key`` is the public key that the signature is to be checked with (see
    ``verify`` in ``checking/verify.py``); ``verdict`` is a verification done before,
    as ``Verdict.to_dict()`` gives it, instead of one done here. Raises
    :class:`~cirron_otel.errors.RecordError` where there is no diary that can be read, and for
    nothing that stands in it. Reads both files twice, once to verify; memory does not grow with
    their length.
    """
    given = Path(path)
    directory = given if given.is_dir() else given.parent if given.name == DIARY else None
    diary = given if directory is None else directory / DIARY
    if not diary.exists():
        raise RecordError(f"there is no training record in {given}: {diary} does not exist")
    run = Run(path=given, diary=diary, directory=directory)
    gatherer = _Gatherer(run)
    for line in objects(diary, run.diary_reading, follow=directory is None):
        gatherer.event(line)
    if directory is not None:
        _metrics(run, gatherer, directory / METRICS)
    gatherer.finish()
    if verdict is None:
        verdict = verify.verify(given, key=key).to_dict()
    run.verdict = dict(verdict)
    return run


def _metrics(run: Run, gatherer: _Gatherer, path: Path) -> None:
    run.metrics_reading = Reading()
    try:
        for row in objects(path, run.metrics_reading, follow=False):
            gatherer.rows.row(row)
    except RecordError as error:
        if run.metrics_reading.lines == 0:
            run.metrics_reading = None
        run.notes.append(str(error) if path.exists() else f"{path} does not exist")


class _Gatherer:
    """Fills a run, line by line."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._open: dict[str, Episode] = {}
        self._stuck = StuckTracker(run)
        self._spike: tuple[Spike, Episode] | None = None
        #: One sign of trouble per step, young enough to warn of a spike.
        self._signs: deque[tuple[int, str]] = deque(maxlen=_EVENT_ROWS)
        #: Steps that a gradient scaler skipped.
        self._skipped: set[int] = set()
        self._ignored_layers = 0
        self.rows = RowTaker(run, self._stuck, self.layer, self._skipped)
        self._lead = 0
        self._previous: Event | None = None

    def layer(self, name: str) -> Layer | None:
        """The layer of that name; None when there are too many."""
        name = name if len(name) <= _NAME else name[: _NAME - 1] + "…"
        layers = self.run.layers
        found = layers.get(name)
        if found is None:
            if len(layers) >= MAX_LAYERS:
                self._ignored_layers += 1
                return None
            found = layers[name] = Layer(name)
        return found

    # ------------------------------------------------------------------ diary

    def event(self, line: dict[str, object]) -> None:
        """Take one line of the diary."""
        run = self.run
        event = event_of(line)
        name = event.name
        if name in run.counts or len(run.counts) < _TYPES:
            run.counts[name] += 1
        if event.time is not None:
            run.first_time = event.time if run.first_time is None else run.first_time
            run.last_time = event.time
        if event.step is not None:
            run.saw(event.step)
            if event.time is not None:
                run.clock.add(event.step, event.time)
        if event.severity == "critical":
            run.critical_events += 1
        self._keep(event)
        if name in LANES and event.step is not None:
            lane = run.marks.setdefault(LANES[name], Marks())
            where = f", {words.layer_name(event.layer)}" if event.layer is not None else ""
            lane.add(event.step, f"{words.title(name)}{where}: {words.describe(event)}")
        handler = getattr(self, f"_{name}", None) if name in _HANDLED else None
        if handler is not None:
            handler(event, line)

    def _keep(self, event: Event) -> None:
        kept = self.run.minor_events if event.name in _MINOR else self.run.events
        before = self._previous
        if (
            event.name in _MINOR
            and before is not None
            and before.name == event.name
            and before.layer == event.layer
            and before.fields.get("reason") == event.fields.get("reason")
        ):
            before.count += 1
            before.last_step = event.step
            return
        kept.add(event)
        if event.name in _MINOR:
            self._previous = event

    def _run_start(self, event: Event, line: dict[str, object]) -> None:
        if not self.run.start:
            self.run.start = line
            config = line.get("config")
            every = whole(config.get("check_every")) if isinstance(config, dict) else None
            self._lead = _LEAD_CHECKS * max(every or 1, 1)
        if event.time is not None:
            self.run.clock.add(0, event.time)

    def _structure(self, _event: Event, line: dict[str, object]) -> None:
        self.run.structure = self.run.structure or line

    def _manifest(self, _event: Event, line: dict[str, object]) -> None:
        if self.run.manifest:
            return
        self.run.manifest = line
        producers = line.get("producers")
        for producer in producers if isinstance(producers, list) else []:
            name = producer.get("layer") if isinstance(producer, dict) else None
            layer = self.layer(name) if isinstance(name, str) else None
            if layer is not None:
                layer.kind = text(producer.get("kind"), 60)
                layer.batchnorm = text(producer.get("batchnorm"))
                layer.certifiable = producer.get("certificate") is True
                layer.reason = text(producer.get("reason"), 300)

    def _alarm(self, event: Event, line: dict[str, object]) -> None:
        layer = self.layer(event.layer) if event.layer is not None else None
        diagnosis = text(line.get("diagnosis"), 40) or "alarm"
        step = event.step or 0
        self._note_sign(step, f"alarm ({diagnosis.replace('_', ' ')}) in {event.layer}")
        if layer is None:
            return
        layer.kind = layer.kind or text(line.get("kind"), 60)
        layer.alarms += 1
        layer.open_alarm = diagnosis
        if diagnosis not in layer.diagnoses and len(layer.diagnoses) < _LIST:
            layer.diagnoses.append(diagnosis)
        self._close_alarm(layer.name, step)
        caused = text(line.get("caused_by"))
        episode = Episode(
            diagnosis, layer.name, step, detail=f"caused by {caused}" if caused else ""
        )
        self._open[layer.name] = episode
        self.run.episodes.add(episode)

    def _alarm_cleared(self, event: Event, _line: dict[str, object]) -> None:
        layer = self.layer(event.layer) if event.layer is not None else None
        if layer is not None:
            layer.open_alarm = None
            self._close_alarm(layer.name, event.step or 0)

    def _close_alarm(self, layer: str, step: int) -> None:
        episode = self._open.pop(layer, None)
        if episode is not None:
            episode.end, episode.outcome = step, "cleared"

    def _channels(self, event: Event, line: dict[str, object]) -> None:
        layer = self.layer(event.layer) if event.layer is not None else None
        if layer is None:
            return
        counts = [
            max(whole(line.get(name)) or 0, 0)
            for name in ("n_certified", "n_flat", "n_observed", "n_decayed")
        ]
        layer.channels = whole(line.get("channels")) or layer.channels
        layer.batchnorm = layer.batchnorm or text(line.get("batchnorm"))
        if event.name == "channels" and stuck_count(counts):
            self._note_sign(event.step or 0, f"stuck channels in {event.layer}")
        self._stuck.note_event(event.step or 0, layer, counts)

    _channels_cleared = _channels

    def _certificate(self, event: Event, line: dict[str, object]) -> None:
        layer = self.layer(event.layer) if event.layer is not None else None
        self._note_sign(event.step or 0, f"channels proven dead in {event.layer}")
        if layer is not None:
            layer.certified = max(layer.certified, whole(line.get("count")) or 0)

    def _certificate_refused(self, event: Event, line: dict[str, object]) -> None:
        layer = self.layer(event.layer) if event.layer is not None else None
        reason = text(line.get("reason"), 300)
        if layer is not None and reason and reason not in layer.refused:
            layer.refused = [*layer.refused, reason][:_LIST]

    def _repair(self, event: Event, line: dict[str, object]) -> None:
        layer = self.layer(event.layer) if event.layer is not None else None
        if line.get("rule") == "undone":
            return
        if layer is not None:
            layer.repairs += 1
            layer.channels_repaired += max(whole(line.get("count")) or 0, 0)
            if event.step is not None:
                self._stuck.note_repair(event.step, layer)

    def _skipped_step(self, event: Event, _line: dict[str, object]) -> None:
        if event.step is not None and len(self._skipped) < _SKIPPED:
            self._skipped.add(event.step)

    def _loss_spike(self, event: Event, line: dict[str, object]) -> None:
        step = event.step or 0
        spike = Spike(step, finite(number(line.get("value"))), number(line.get("baseline")))
        self._forget_signs(step)
        if self._signs:
            spike.sign_step, spike.sign = self._signs[0]
        episode = Episode("loss_spike", None, step)
        self._spike = (spike, episode)
        self.run.spikes.add(spike)
        self.run.episodes.add(episode)

    def _loss_recovered(self, event: Event, _line: dict[str, object]) -> None:
        if self._spike is not None:
            spike, episode = self._spike
            spike.recovered = episode.end = event.step
            episode.outcome = "cleared"
            self._spike = None
        self._signs.clear()

    def _note_sign(self, step: int, what: str) -> None:
        self._forget_signs(step)
        if not self._signs or self._signs[-1][0] != step:
            self._signs.append((step, what))

    def _forget_signs(self, step: int) -> None:
        while self._signs and step - self._signs[0][0] > self._lead:
            self._signs.popleft()

    def _run_end(self, event: Event, line: dict[str, object]) -> None:
        self.run.end = line
        steps = whole(line.get("steps"))
        if steps is not None and event.time is not None:
            self.run.clock.add(steps, event.time)

    # ----------------------------------------------------------------- finish

    def finish(self) -> None:
        """Close what is open, and derive what is known only at the end."""
        run = self.run
        if not run.checks:
            self._stuck.replay_events()
        self._stuck.finish()
        self.rows.finish()
        if self._ignored_layers:
            run.notes.append(f"only the first {MAX_LAYERS} layers are shown")
        _reading_notes(run)


def _reading_notes(run: Run) -> None:
    """Say what of the files could not be read."""
    for what, reading in (("diary", run.diary_reading), ("metrics", run.metrics_reading)):
        if reading is None or not reading.bad:
            continue
        broken = reading.bad - reading.torn
        if broken:
            run.notes.append(
                f"{broken} line(s) of the {what} are no JSON objects and are not shown, "
                f"the first is line {reading.first_bad}"
            )
        if reading.torn:
            run.notes.append(f"the last line of the {what} is half written, as a crash leaves it")


_HANDLED = frozenset(
    {
        "run_start",
        "structure",
        "manifest",
        "alarm",
        "alarm_cleared",
        "channels",
        "channels_cleared",
        "certificate",
        "certificate_refused",
        "repair",
        "skipped_step",
        "loss_spike",
        "loss_recovered",
        "run_end",
    }
)
_NAME = 200
_TYPES = 200
_SKIPPED = 200_000
_EVENT_ROWS = 20_000
