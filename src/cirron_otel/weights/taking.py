"""Snapshots of one recording: when they are taken, of what, and what becomes of them.

Statistics are made on the thread that trains, at the boundary: right after it the weights may
change. Files are written there too, straight from the tensors: a copy to be written later would
cost the memory of a whole model, and takes half as long as writing does.

Nothing is kept of a model between two snapshots, and nothing is put on it.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from cirron_otel import semconv
from cirron_otel._guard import logger
from cirron_otel.batch import SnapshotRecord
from cirron_otel.values import capture_gate
from cirron_otel.version import VERSION
from cirron_otel.watching import WatchedModel, watched
from cirron_otel.weights import choosing, containers, policy
from cirron_otel.weights.blobs import LARGE_BYTES, Blobs
from cirron_otel.weights.kinds import GRADIENTS, WEIGHTS
from cirron_otel.weights.measuring import Measured, measured
from cirron_otel.weights.tensors import (
    Named,
    UnknownModelError,
    changed_by,
    distinct,
    dtype_name,
    gradients,
    local,
    models_of,
    weights,
)

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder
    from cirron_otel.scope_base import BaseScope

#: Rows kept in memory while the disk refuses them.
_MAX_ROWS = 100_000

#: The destinations that take the files of snapshots too.
FILE_DESTINATIONS = frozenset({"platform", "event_stream"})

#: Why a tensor may have no statistics and have values all the same.
_HAS_VALUES = frozenset({"complex", "dtype"})

EPOCH_END, LAST_STEP, EVERY, CALL = "epoch_end", "last_step", "every", "call"


class Snapshots:
    """What takes the snapshots of one recorder. Never raises; on the thread that trains."""

    def __init__(self, rec: Recorder, *, uploads_to: Iterable[str] = ()) -> None:
        """Wait for nothing yet. ``uploads_to`` names the destinations that take files."""
        settings = rec.settings
        self._rec = rec
        self._mode: policy.Mode | None = settings.snapshots
        self._every = settings.snapshot_every
        self._blobs = Blobs(
            rec.spool,
            rec.guard,
            max_bytes=settings.snapshot_max_bytes,
            uploads_to=uploads_to,
            rows_wait_s=settings.flush_interval,
        )
        self._here = threading.local()
        self._hinted = False
        self.taken = 0
        self.tensors = 0
        self.last_duration_ns = 0
        self.skipped: Counter[str] = Counter()

    # --- when ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Wait for the boundaries of the loops."""
        if self._mode is None:
            return
        self._rec.at_epoch_end.append(self._epoch_ending)
        watched.listeners.append(self._wait_for_steps)
        self._wait_for_steps()

    def stop(self) -> None:
        """Wait for nothing any more."""
        rec = self._rec
        for waiting, call in (
            (rec.at_epoch_end, self._epoch_ending),
            (rec.before_optimizer_step, self._optimizer_stepping),
            (watched.listeners, self._wait_for_steps),
        ):
            if call in waiting:
                waiting.remove(call)  # type: ignore[arg-type]

    def _wait_for_steps(self) -> None:
        """Optimizer steps are waited for only while a model is watched: else they cost nothing."""
        waiting = self._rec.before_optimizer_step
        is_waiting = self._optimizer_stepping in waiting
        wanted = bool(watched.models or watched.trained())
        if wanted and not is_waiting:
            waiting.append(self._optimizer_stepping)
        elif is_waiting and not wanted:
            waiting.remove(self._optimizer_stepping)

    def _epoch_ending(self, epoch: BaseScope) -> None:
        entries = choosing.at_boundary(self._rec, epoch.id)
        if not entries:
            if not self._hinted and "torch" in sys.modules:
                self._hinted = True
                logger.info(
                    "cirron-otel: no snapshots are taken: ci.watch(model) says of which model"
                )
            return
        done = self._gradients_done(self._rec.loops.iteration)
        kinds = self._kinds(entries)
        kinds[GRADIENTS] = [one for one in kinds[GRADIENTS] if one.owner not in done]
        self._take(kinds, EPOCH_END, self._mode_for(entries), parent=epoch)

    def _optimizer_stepping(self, optimizer: Any) -> None:  # noqa: ANN401 - any framework's
        """Gradients are looked at before the last step of a pass uses them, and clears them."""
        rec = self._rec
        iteration = rec.loops.iteration
        every = self._every and iteration and iteration % self._every == 0
        if not every and not rec.loops.is_last_step():
            return
        epoch = rec.loops.current_epoch()
        entries = choosing.at_boundary(rec, None if epoch is None else epoch.id)
        changing = changed_by(optimizer)
        done = self._gradients_done(iteration)
        weights_too = bool(every) and getattr(self._here, "weights_of", None) != iteration
        kinds = self._kinds(entries, weights_too=weights_too)
        if weights_too:
            self._here.weights_of = iteration
        kinds[GRADIENTS] = [
            one
            for one in kinds[GRADIENTS]
            if (changing is None or one.owner in changing) and one.owner not in done
        ]
        done.update(one.owner for one in kinds[GRADIENTS])
        self._take(kinds, EVERY if every else LAST_STEP, self._mode_for(entries))

    def _gradients_done(self, iteration: int) -> set[int]:
        """The parameters whose gradients were looked at in this step, by identity."""
        here = self._here
        if getattr(here, "iteration", None) != iteration:
            here.iteration, here.done = iteration, set()
        done: set[int] = here.done
        return done

    def by_hand(
        self, entries: Sequence[WatchedModel], name: str | None, mode: policy.Mode | None
    ) -> str | None:
        """A snapshot that the program asks for; the id of its scope, None where it is off."""
        if self._mode is None or not self._rec.active:
            return None
        return self._take(self._kinds(entries), CALL, self._mode_for(entries, mode), name=name)

    def _mode_for(
        self, entries: Sequence[WatchedModel], mode: policy.Mode | None = None
    ) -> policy.Mode:
        """What is kept of these models: of replicas the first rank alone writes files."""
        mode = mode or self._mode or "stats"
        if mode == "stats" or self._rec.rank == 0:
            return mode
        replicas = all(choosing.is_replica(self._rec, one.model) for one in entries)
        return "stats" if replicas else mode

    # --- of what ---------------------------------------------------------------------------------

    def _kinds(
        self, entries: Sequence[WatchedModel], *, weights_too: bool = True
    ) -> dict[str, list[Named]]:
        """The weights and gradients of the models, each under a name of its own."""
        found: dict[str, list[Named]] = {WEIGHTS: [], GRADIENTS: []}
        for prefix, one in models_of(entries):
            try:
                if weights_too:
                    found[WEIGHTS] += weights(one.model, prefix, buffers=one.buffers)
                found[GRADIENTS] += gradients(one.model, prefix)
            except Exception as error:  # noqa: BLE001 - its own methods may; the others go on
                known = isinstance(error, UnknownModelError)
                self.skipped["no_model" if known else "model_error"] += 1
                kind = type(one.model)
                why = error if known else f"no snapshot of type {kind.__name__}: {error!r}"
                self._rec.guard.warn(f"snapshot {kind}", str(why))
        taken: set[str] = set()
        return {kind: distinct(tensors, taken) for kind, tensors in found.items()}

    # --- taking ----------------------------------------------------------------------------------

    def _take(
        self,
        kinds: dict[str, list[Named]],
        trigger: str,
        mode: policy.Mode,
        *,
        parent: BaseScope | None = None,
        name: str | None = None,
    ) -> str | None:
        """One snapshot in a scope of its own; the scope's id."""
        rec = self._rec
        if not any(kinds.values()):
            return None
        if capture_gate.captures:
            self.skipped["graph_capture"] += 1
            return None
        attrs: dict[str, Any] = {semconv.SNAPSHOT_TRIGGER: trigger}
        if name is not None:
            attrs[semconv.SNAPSHOT_NAME] = name
        scope = rec.make_scope(semconv.SNAPSHOT, None, attrs)
        if not self._open(scope, parent):
            return None
        error: BaseException | None = None
        try:
            epoch = parent or rec.loops.current_epoch()
            index = None if epoch is None else epoch.index
            if index is not None:
                scope.attrs = {**scope.attrs, semconv.EPOCH_INDEX: index}
            moment = (rec.run_id, index, rec.loops.iteration, name or "")
            chosen = policy.writes_tensors(mode, rec.settings.sample_rate, *moment)
            self._fill(scope, kinds, mode if chosen else "stats")
        except Exception as failure:
            error = failure
            raise
        finally:
            scope.close(exc=error)
            self.taken += 1
            self.last_duration_ns = scope.end_ns - scope.start_ns
        return scope.id

    def _open(self, scope: BaseScope, parent: BaseScope | None) -> bool:
        """Open a scope; one at a boundary is no sign of life to the passes that wait for one."""
        rec = self._rec
        # The step that the values are of: the one under way, or at an epoch's end the last one.
        steps = rec.loops.iteration
        iteration = steps - 1 if steps > rec.settings.start_iteration else None
        if parent is None:
            return scope.open(iteration=iteration)
        waited, rec.pending = rec.pending, False
        try:
            return scope.open(parent=parent, iteration=iteration)
        finally:
            rec.pending = waited or rec.pending

    def _fill(self, scope: BaseScope, kinds: dict[str, list[Named]], mode: policy.Mode) -> None:
        rec = self._rec
        if mode != "stats":
            self._announce(kinds, mode)
        # One call for both kinds: threads start once, and a device is waited for once.
        own = [(kind, one) for kind, each in kinds.items() for one in each if one.tied_to is None]
        found = measured(rec.guard, [one for _, one in own])
        stats = {(kind, one.owner): each for (kind, one), each in zip(own, found, strict=True)}
        count = size = 0
        wrote = False
        for kind, tensors in kinds.items():
            if not tensors:
                continue
            rows = self._rows(scope, tensors, [stats[kind, one.owner] for one in tensors])
            if mode != "stats":
                written = self._write(scope, kind, tensors, rows, mode)
                size += written
                wrote = wrote or written > 0
            if len(rec.batcher.snapshots) + len(rows) > _MAX_ROWS:
                rec.guard.lost("disk_full_snapshots", len(rows))
                continue
            rec.batcher.snapshots.extend(rows)
            count += len(rows)
        self.tensors += count
        shown: dict[str, Any] = {
            semconv.SNAPSHOT_MODE: mode if wrote else "stats", semconv.SNAPSHOT_TENSORS: count
        }  # fmt: skip
        if size:
            shown[semconv.SNAPSHOT_BYTES] = size
        scope.attrs = {**scope.attrs, **shown}

    def _rows(
        self, scope: BaseScope, tensors: Sequence[Named], stats: Sequence[Measured]
    ) -> list[SnapshotRecord]:
        rec = self._rec
        now = rec.clock.now()
        rows = []
        for one, found in zip(tensors, stats, strict=True):
            attrs = {**one.attrs, **found.attrs}
            if found.skipped is not None:
                attrs[semconv.SKIPPED] = found.skipped
                if one.tied_to is None:
                    self.skipped[found.skipped] += 1
            row = SnapshotRecord(
                rec.next_mark_id(), scope.id, one.name, one.shape, dtype_name(one.tensor),
                "stats", cast("Any", found.stats), None, now, attrs,
            )  # fmt: skip
            rows.append(row)
        return rows

    # --- files -----------------------------------------------------------------------------------

    def _write(
        self,
        scope: BaseScope,
        kind: str,
        tensors: Sequence[Named],
        rows: Sequence[SnapshotRecord],
        mode: policy.Mode,
    ) -> int:
        """Write the tensors of one kind; their rows then say where. The bytes of the tensors."""
        parts = []
        for one, row in zip(tensors, rows, strict=True):
            if one.tied_to is not None:
                continue
            part = _part(one, row)
            if part is None:
                self.skipped["not_in_file"] += 1
            else:
                parts.append(part)
        if not parts:
            return 0
        written = self._blobs.write(scope.id, kind, parts, self._metadata(scope, tensors))
        if written is None:
            return 0
        if len(written.names) < len(parts):
            self.skipped["not_in_file"] += len(parts) - len(written.names)
        for row in rows:
            if row.tensor_name in written.names:
                row.blob_uri, row.mode = written.uri, mode
        return written.size

    def _metadata(self, scope: BaseScope, tensors: Sequence[Named]) -> dict[str, str]:
        metadata = {
            semconv.FILE_SPAN: scope.id,
            semconv.FILE_STEP: str(scope.iteration) if isinstance(scope.iteration, int) else "",
            semconv.FILE_SDK: f"{semconv.INSTRUMENTATION_NAME} {VERSION}",
            "format": "pt",
        }
        # As safetensors itself says it of tensors that share their memory.
        for one in tensors:
            if one.tied_to is not None:
                metadata.setdefault(one.name, one.tied_to)
        return metadata

    def _announce(self, kinds: dict[str, list[Named]], mode: str) -> None:
        """Say once what a large model's snapshots take on disk, before the first is written."""
        sizes = {kind: sum(map(_size, tensors)) for kind, tensors in kinds.items()}
        total = sum(sizes.values())
        if total < LARGE_BYTES:
            return
        cap = self._rec.settings.snapshot_max_bytes
        kept = f"the newest {max(1, cap // total)} of them are kept" if total <= cap else (
            "that is more than is kept"
        )  # fmt: skip
        self._rec.guard.warn(
            "snapshot_size",
            f"snapshots={mode!r} writes {total / 1e6:,.0f} MB for each snapshot of this model "
            f"(weights {sizes[WEIGHTS] / 1e6:,.0f} MB, gradients {sizes[GRADIENTS] / 1e6:,.0f} MB)"
            f" to {self._blobs.directory}; {kept} (snapshot_max_bytes is {cap / 1e6:,.0f} MB). "
            "snapshots='stats' writes no files",
        )

    # --- health ----------------------------------------------------------------------------------

    def health(self) -> dict[str, Any]:
        """``health()["snapshots"]``."""
        blobs = self._blobs
        return {
            "mode": self._mode or "off",
            "taken": self.taken,
            "tensors": self.tensors,
            "skipped": dict(self.skipped),
            "files": blobs.files,
            "file_bytes": blobs.bytes,
            "evicted_files": blobs.evicted_files,
            "last_duration_ns": self.last_duration_ns,
        }


def _part(one: Named, row: SnapshotRecord) -> containers.Part | None:
    """The tensor as a part of a file; None where it has no values, or none that a file can hold."""
    skipped = row.attrs.get(semconv.SKIPPED)
    if skipped is not None and skipped not in _HAS_VALUES:
        return None
    try:
        return containers.part_of(one.name, local(one.tensor), row.dtype)
    except Exception:  # noqa: BLE001 - a subclass may do anything
        return None


def _size(one: Named) -> int:
    code = containers.code_of(dtype_name(one.tensor))
    if code is None or one.tied_to is not None:
        return 0
    return math.prod(one.shape) * containers.ITEM_BYTES[code]
