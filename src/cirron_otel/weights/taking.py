"""Snapshots of one recording: when they are taken, of what, and what becomes of them.

Statistics are made on the thread that trains, at the boundary: right after it the weights may
change. Files are written there too, straight from the tensors: a copy to be written later would
cost the memory of a whole model, and takes half as long as writing does.

Nothing is kept of a model between two snapshots, and nothing is put on it.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from cirron_otel import semconv
from cirron_otel._guard import logger
from cirron_otel.batch import SnapshotRecord
from cirron_otel.driven import active_loop
from cirron_otel.values import capture_gate
from cirron_otel.version import VERSION
from cirron_otel.watching import WatchedModel, watched
from cirron_otel.weights import containers, policy
from cirron_otel.weights.blobs import LARGE_BYTES, Blobs
from cirron_otel.weights.measuring import measured
from cirron_otel.weights.tensors import (
    GRADIENTS,
    WEIGHTS,
    Named,
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

#: Wrappers that keep the same values on every rank.
_REPLICAS = frozenset({"DistributedDataParallel"})

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
            rec.spool, rec.guard, max_bytes=settings.snapshot_max_bytes, uploads_to=uploads_to
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
        if watched.models and not is_waiting:
            waiting.append(self._optimizer_stepping)
        elif is_waiting and not watched.models:
            waiting.remove(self._optimizer_stepping)

    def _epoch_ending(self, epoch: BaseScope) -> None:
        entries = watched.entries
        if not entries:
            if not self._hinted and "torch" in sys.modules:
                self._hinted = True
                logger.info(
                    "cirron-otel: no snapshots are taken: ci.watch(model) says of which model"
                )
            return
        done = self._gradients_done(self._rec.loops.iteration)
        kinds = self._kinds(entries, gradients_too=True)
        kinds[GRADIENTS] = [one for one in kinds[GRADIENTS] if one.owner not in done]
        self._take(kinds, EPOCH_END, parent=epoch, mode=self._mode_for(entries))

    def _optimizer_stepping(self, optimizer: Any) -> None:  # noqa: ANN401 - any framework's
        """Gradients are looked at before the last step of a pass uses them, and clears them."""
        rec = self._rec
        iteration = rec.loops.iteration
        every = self._every and iteration and iteration % self._every == 0
        driven = active_loop(rec)
        if not every and not (rec.loops.is_last_step() if driven is None else driven.is_last_step):
            return
        entries = watched.entries
        changing = _parameters(optimizer)
        done = self._gradients_done(iteration)
        kinds: dict[str, list[Named]] = {WEIGHTS: [], GRADIENTS: []}
        if every and getattr(self._here, "weights_of", None) != iteration:
            self._here.weights_of = iteration
            kinds[WEIGHTS] = self._kinds(entries, gradients_too=False)[WEIGHTS]
        for prefix, one in models_of(entries):
            kinds[GRADIENTS] += [
                gradient
                for gradient in self._gradients(one, prefix)
                if (changing is None or gradient.owner in changing) and gradient.owner not in done
            ]
        done.update(gradient.owner for gradient in kinds[GRADIENTS])
        trigger = EVERY if every else LAST_STEP
        self._take(kinds, trigger, mode=self._mode_for(entries))

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
        kinds = self._kinds(entries, gradients_too=True)
        return self._take(kinds, CALL, name=name, mode=mode or self._mode_for(entries))

    def _mode_for(self, entries: Sequence[WatchedModel]) -> policy.Mode | None:
        """What is kept of these models: of replicas the first rank alone writes files."""
        replicas = all(type(one.model).__name__ in _REPLICAS for one in entries)
        return "stats" if replicas and self._rec.rank > 0 else self._mode

    # --- of what ---------------------------------------------------------------------------------

    def _kinds(
        self, entries: Sequence[WatchedModel], *, gradients_too: bool
    ) -> dict[str, list[Named]]:
        found: dict[str, list[Named]] = {WEIGHTS: [], GRADIENTS: []}
        for prefix, one in models_of(entries):
            try:
                found[WEIGHTS] += weights(one.model, prefix, buffers=one.buffers)
            except TypeError as error:
                self._rec.guard.warn(f"snapshot {type(one.model)}", str(error))
                self.skipped["no_model"] += 1
                continue
            if gradients_too:
                found[GRADIENTS] += self._gradients(one, prefix)
        return found

    @staticmethod
    def _gradients(one: WatchedModel, prefix: str) -> list[Named]:
        try:
            return gradients(one.model, prefix)
        except TypeError:  # said where its weights are looked for
            return []

    # --- taking ----------------------------------------------------------------------------------

    def _take(
        self,
        kinds: dict[str, list[Named]],
        trigger: str,
        *,
        parent: BaseScope | None = None,
        name: str | None = None,
        mode: policy.Mode | None = None,
    ) -> str | None:
        """One snapshot in a scope of its own; the scope's id."""
        rec = self._rec
        if not any(kinds.values()):
            return None
        if capture_gate.captures:
            self.skipped["graph_capture"] += 1
            return None
        mode = mode or self._mode or "stats"
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
        count = size = 0
        wrote = False
        for kind, tensors in kinds.items():
            if not tensors:
                continue
            rows = self._rows(scope, tensors)
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

    def _rows(self, scope: BaseScope, tensors: Sequence[Named]) -> list[SnapshotRecord]:
        rec = self._rec
        own = [one for one in tensors if one.tied_to is None]
        stats = dict(zip((one.name for one in own), measured(rec.guard, own), strict=True))
        now = rec.clock.now()
        rows = []
        for one in tensors:
            found = stats[one.tied_to or one.name]
            attrs = {**one.attrs, **found.attrs}
            if found.skipped is not None:
                attrs[semconv.SKIPPED] = found.skipped
                if one.tied_to is None:
                    self.skipped[found.skipped] += 1
            row = SnapshotRecord(
                rec.next_mark_id(), scope.id, one.name, one.shape, dtype_name(one.tensor),
                "stats", found.stats, None, now, attrs,
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
            part = containers.part_of(one.name, local(one.tensor), row.dtype)
            if part is None:
                self.skipped["not_in_file"] += 1
            else:
                parts.append(part)
        if not parts:
            return 0
        uri = self._blobs.write(scope.id, kind, parts, self._metadata(scope, tensors))
        if uri is None:
            return 0
        written = {part.name for part in parts}
        for row in rows:
            if row.tensor_name in written:
                row.blob_uri, row.mode = uri, mode
        return sum(part.size for part in parts)

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


def _parameters(optimizer: object) -> set[int] | None:
    """The parameters that an optimizer changes, by identity; None where it does not say."""
    groups = getattr(optimizer, "param_groups", None)
    return None if groups is None else {id(one) for group in groups for one in group["params"]}


def _size(one: Named) -> int:
    code = containers.code_of(dtype_name(one.tensor))
    if code is None or one.tied_to is not None:
        return 0
    size = containers.ITEM_BYTES[code]
    for length in one.shape:
        size *= length
    return size
