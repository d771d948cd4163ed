"""``Monitor``: what a training program calls once per optimizer step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from cirron_otel import record_anchors, recorder
from cirron_otel.errors import ConfigurationError
from cirron_otel.findings import OnFinding, callbacks_of
from cirron_otel.monitor import manifest
from cirron_otel.monitor.config import MonitorConfig
from cirron_otel.monitor.modules import (
    describe_model,
    describe_optimizer,
    is_optimizer,
    place_of,
    unwrap_model,
    unwrap_optimizer,
    watched_layers,
)
from cirron_otel.monitor.pipeline import Pipeline
from cirron_otel.monitor.scaling import Scaling
from cirron_otel.monitor.telling import Sink, Teller

if TYPE_CHECKING:
    from types import TracebackType

    from cirron_otel.monitor.structure import Discovery
    from cirron_otel.recorder import Recorder

#: The directory of a record where none is named and nothing is recorded.
DEFAULT_OUT = "monitor_run"
_SHORTCUTS = ("check_every", "patience", "sigma", "warmup")


class Monitor:
    """Watches a training layer by layer and writes its training record.

    Call :meth:`step` once per optimizer step, after ``backward()`` and before ``optimizer.step()``.
    Steps count from 0, and each ``check_every``-th is checked: gradients, loss and weights are
    looked at in one pass, what is unusual becomes an event of the record and a ``Finding``.

    Args:
        model: the module that is trained; wrappers (DDP, ``torch.compile``) may be around it.
        optimizer: the one that trains it; wrappers may be around it.
        out: the run directory of the record; default: ``records/<run id>`` in the recording's
            output directory, or ``monitor_run`` where nothing is recorded.
        repair: True re-initialises channels that stay dead, constant or decayed, but those that
            were zero at the first check; ``"all"`` these and silent ones too. See
            ``docs/certificate.md``, and :meth:`undo_repair`.
        check_every: as ``patience``, ``sigma`` and ``warmup`` overrides ``config``.
        name: the run's name in the record; default: the directory's.
        sinks: functions called with ``("event", line)`` and ``("metrics", row)``.
        verbose: False keeps findings out of the log.
        config: a :class:`~cirron_otel.monitor.config.MonitorConfig`.
        scaler: the ``GradScaler`` in use, if any.
        layers: names or patterns (``fnmatch``) of the layers to watch; default: all that learn.
        overwrite: set a record that is in ``out`` aside.
        append: go on with a record that is in ``out``, as its next segment.
        on_finding: functions called with each ``Finding``, on the training thread.
        stop_on: severities or kinds of findings that end the training: :meth:`step` then raises
            :class:`~cirron_otel.errors.StopTraining` once the check is written.
        reduce_norms: under FSDP, put the gradient norms of all ranks together at each check; then
            every rank has to call :meth:`step` alike. Without it they are those of rank 0's shards.

    The constructor raises :class:`~cirron_otel.errors.ConfigurationError` (a ``ValueError``) for
    what cannot be used, :class:`~cirron_otel.errors.RecordExistsError` (a ``FileExistsError``)
    where a record is, and other :class:`~cirron_otel.errors.RecordError`; then nothing has been
    changed. Afterwards only :meth:`step` after :meth:`close` raises, and what ``stop_on`` or an
    ``on_finding`` function asks for.

    One thread. A check waits for the device once; between checks nothing does.
    """

    def __init__(  # noqa: PLR0913 - see above
        self,
        model: object,
        optimizer: object = None,
        *,
        out: str | Path | None = None,
        repair: bool | str = False,
        check_every: int | None = None,
        patience: int | None = None,
        sigma: float | None = None,
        warmup: int | None = None,
        name: str | None = None,
        sinks: Iterable[Sink] = (),
        verbose: bool = True,
        config: MonitorConfig | None = None,
        scaler: object = None,
        layers: Sequence[str] | None = None,
        overwrite: bool = False,
        append: bool = False,
        on_finding: OnFinding | Iterable[OnFinding] | None = None,
        stop_on: str | Iterable[str] = (),
        reduce_norms: bool = False,
    ) -> None:
        self._closed = True  # until it is whole
        given = {
            "check_every": check_every, "patience": patience, "sigma": sigma, "warmup": warmup,
        }  # fmt: skip
        self.config = _config(config, given)
        unwrapped = unwrap_model(model)
        self._model = unwrapped.model
        inner = unwrap_optimizer(optimizer)
        scaling = Scaling(scaler, inner)
        watched, total = watched_layers(self._model, layers)
        callbacks = callbacks_of(on_finding)
        stops = (stop_on,) if isinstance(stop_on, str) else tuple(stop_on)
        place = place_of(unwrapped)
        _check_repair(repair, inner, place.mode)
        self.rank, self.world_size, self.dist_mode = place.rank, place.world_size, place.mode
        facts = manifest.Facts(
            config=self.config, model=self._model, optimizer=inner, layers=watched, total=total,
            patterns=layers, place=place, wrappers=unwrapped.wrappers, scaling=scaling,
            is_compiled=unwrapped.is_compiled, shares_norms=reduce_norms and place.mode == "fsdp",
            repair=repair,
        )  # fmt: skip
        self._journal = record_anchors.open_journal(
            _directory(out),
            name=name,
            rank=self.rank,
            overwrite=overwrite,
            append=append,
            run_start={
                **describe_model(self._model),
                "layers": len(watched),
                "optimizer": describe_optimizer(inner),
                "torch": torch.__version__,
                "config": {
                    **self.config.to_dict(),
                    "repair": repair,
                    "layers": None if layers is None else list(layers),
                },
            },
        )
        self.out = self._journal.directory
        teller = (
            Teller(self._journal, _recording, sinks, callbacks, stops, verbose=verbose)
            if self.rank == 0
            else Teller(self._journal, lambda: None, (), (), (), verbose=False)
        )
        self._pipeline = Pipeline(facts, self._journal, teller, _step_of(self))
        self._every = self.config.check_every
        self._step = 0
        self._due = 0
        self._checks = 0
        self._loss: object = None
        # Other ranks have the same gradients: one of them looks, and writes. All repair alike.
        self._looks = self.rank == 0 or repair is not False
        self._takes_part = facts.shares_norms
        self._closed = False
        if self._looks:
            self._pipeline.begin_first_window()

    # --- what the training calls ----------------------------------------------------------------

    def step(self, loss: object = None) -> None:
        """Note an optimizer step, and check if it is due.

        Call it after ``backward()`` (and after ``scaler.unscale_()`` where that is used), before
        ``optimizer.step()``. ``loss`` is a number or a tensor; without it what :meth:`note_loss`
        was given counts. Raises ``RuntimeError`` after :meth:`close`.
        """
        if self._closed:
            raise RuntimeError("this monitor is closed: make another one for another run")
        step = self._step
        self._step = step + 1
        if step != self._due:
            self._loss = None
            if step + 1 == self._due and self._looks:
                self._pipeline.begin_window()
            return
        noted, self._loss = self._loss, None
        self._due = step + self._every
        if self._looks:
            self._check(step, noted if loss is None else loss)
        elif self._takes_part:
            self._pipeline.take_part()

    def note_loss(self, loss: object) -> None:
        """Give the loss of the step under way, where :meth:`step` cannot be given it."""
        if self._step == self._due:  # of other steps nobody asks
            self._loss = self._pipeline.kept_loss(loss)

    def close(self, report: bool = True) -> str | None:  # noqa: FBT001, FBT002 - a public name
        """End the record, and write ``report.html`` beside it unless ``report`` is false.

        Returns the path of the report on rank 0, else None. A second call does nothing. Waits at
        most five seconds for the disk, and as long as the report takes. Never raises.
        """
        return self._close(None, report=report)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(error, report=True)

    def undo_repair(self, layer: str | None = None) -> int:
        """Put back what the last repair of ``layer`` replaced; without a name, of every layer.

        Weights, BatchNorm and optimizer state of the repaired channels become what they were,
        whatever has been learned since; the record says so. Returns how many repairs were undone,
        0 where there is none that can be. Under DDP every rank has to call it. Waits for the
        device.
        """
        if self._closed:
            raise RuntimeError("this monitor is closed: repairs can no longer be undone")
        return self._pipeline.undo_repair(layer)

    @property
    def wants_graph(self) -> bool:
        """Whether the graph of the step's loss will be looked at, if that is checked."""
        return self._looks and self._pipeline.wants_graph

    @property
    def wants_loss(self) -> bool:
        """Whether the step under way will be checked."""
        return self._step == self._due and self._looks and not self._closed

    def use_scaler(self, scaler: object) -> None:
        """Say which gradient scaler is in use, for hooks that find it out; a given one stays."""
        self._pipeline.use_scaler(scaler)

    def take_over(self, discovery: Discovery) -> None:
        """Go on with hooks that have seen the first passes before this monitor was made."""
        if self._looks and self._step == 0:
            self._pipeline.take_over(discovery)
        else:
            discovery.forget()

    # --- what it says of itself -----------------------------------------------------------------

    @property
    def check_every(self) -> int:
        """Steps from one check to the next."""
        return self.config.check_every

    @property
    def patience(self) -> int:
        """See :class:`~cirron_otel.monitor.config.MonitorConfig`."""
        return self.config.patience

    @property
    def sigma(self) -> float:
        """See :class:`~cirron_otel.monitor.config.MonitorConfig`."""
        return self.config.sigma

    @property
    def warmup(self) -> int:
        """See :class:`~cirron_otel.monitor.config.MonitorConfig`."""
        return self.config.warmup

    @property
    def counts(self) -> dict[str, int]:
        """The counts so far, as ``run_end`` will have them."""
        return self._journal.counts

    @property
    def step_count(self) -> int:
        """Calls of :meth:`step` so far."""
        return self._step

    @property
    def checks(self) -> int:
        """Checks so far."""
        return self._checks

    @property
    def pairs(self) -> dict[str, str]:
        """Producer to the BatchNorm that it feeds; empty before the first check."""
        return self._pipeline.pairs

    # --- inside ---------------------------------------------------------------------------------

    def _check(self, step: int, loss: object) -> None:
        pipeline = self._pipeline
        self._journal.steps = step + 1
        self._checks += 1
        try:
            pipeline.check(step, loss)
            if self._every > 1:
                pipeline.end_window()
            else:
                pipeline.begin_window()
        except Exception as error:  # noqa: BLE001 - see _guard
            self._journal.guard.lost("monitor_check_failed")
            self._journal.guard.swallow("monitor.check", error)
        stop = pipeline.teller.take_stop()
        if stop is not None:
            raise stop

    def _close(self, error: BaseException | None, *, report: bool) -> str | None:
        if self._closed:
            return None
        self._closed = True
        guard = self._journal.guard
        try:
            self._pipeline.stop()
            self._journal.steps = self._step
            self._journal.close(error)
            if report and self.rank == 0:
                return manifest.write_report(self.out)
        except Exception as failure:  # noqa: BLE001 - see _guard
            guard.swallow("monitor.close", failure)
        return None


def _step_of(monitor: Monitor) -> Callable[[], int]:
    """What gives the step under way, and does not keep the monitor alive."""
    reference = weakref.ref(monitor)

    def step() -> int:
        monitor = reference()
        return 0 if monitor is None else monitor.step_count - 1

    return step


def _recording() -> Recorder | None:
    rec = recorder._current  # noqa: SLF001 - see recorder
    return rec if rec is not None and rec.active else None


def _config(config: object, given: dict[str, Any]) -> MonitorConfig:
    if config is None:
        config = MonitorConfig()
    if not isinstance(config, MonitorConfig):
        raise TypeError(f"Monitor(config=...): {type(config).__name__} is no MonitorConfig")
    return config.replace(**{name: value for name, value in given.items() if value is not None})


def _check_repair(repair: object, optimizer: object, mode: str) -> None:
    if repair not in (False, True, "all"):
        raise ConfigurationError(f"Monitor(repair={repair!r}): give False, True or 'all'")
    if repair is not False and not is_optimizer(optimizer):
        raise ConfigurationError("Monitor(repair=...) needs the torch optimizer of the model")
    if repair is not False and mode == "fsdp":
        raise ConfigurationError(
            "Monitor(repair=...) does not work under FSDP: each rank holds a part of each weight"
        )


def _directory(out: str | Path | None) -> Path:
    if out is not None:
        return Path(out).expanduser()
    rec = _recording()
    if rec is None:
        return Path(DEFAULT_OUT)
    return Path(rec.settings.output_dir) / "records" / rec.run_id
