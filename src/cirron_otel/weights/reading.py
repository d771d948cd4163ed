"""Snapshots read back from a spool: their rows by scope, with the epoch and step they are of.

Knows neither torch nor OpenTelemetry: a run is read on a machine that has none. Everything here
blocks while it reads files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from cirron_otel import semconv
from cirron_otel.batch import SCHEMA_VERSION
from cirron_otel.errors import CirronError, SpoolError, SpoolFormatError
from cirron_otel.reading.rows import read
from cirron_otel.spool import Spool
from cirron_otel.weights.kinds import GRADIENT_SUFFIX, GRADIENTS, WEIGHTS

OnError = Callable[[Path, Exception], None]

#: The columns of :func:`table`, in order.
COLUMNS = (
    "session", "rank", "span", "epoch", "iteration", "trigger", "name", "time", "kind", "tensor",
    "shape", "dtype", "mode", "mean", "std", "min", "max", "norm", "nonfinite", "bins", "counts",
    "skipped", "blob_uri",
)  # fmt: skip


class NoSuchSnapshotError(CirronError, LookupError):
    """No snapshot, or more than one, is meant; the message lists what there is."""


class Row(msgspec.Struct, gc=False):
    """One row of ``snapshots[]``. What a foreign writer left out is empty."""

    span_id: str
    id: str = ""
    tensor_name: str = ""
    shape: list[int] = []
    dtype: str = "unknown"
    mode: str = "stats"
    stats: dict[str, Any] | None = None
    blob_uri: str | None = None
    ts_ns: int = 0
    attrs: dict[str, Any] = {}

    @property
    def kind(self) -> str:
        """``weights`` or ``gradients``, as the file says; without one, as the name does."""
        if self.blob_uri is not None:
            name = self.blob_uri.rpartition("/")[2].partition(".")[0]
            if name in {WEIGHTS, GRADIENTS}:
                return name
        return GRADIENTS if self.tensor_name.endswith(GRADIENT_SUFFIX) else WEIGHTS

    @property
    def is_own(self) -> bool:
        """Whether it is a parameter, or a gradient, under the first of its names."""
        return semconv.TIED_TO not in self.attrs and semconv.BUFFER not in self.attrs

    @property
    def skipped(self) -> str | None:
        """Why there are no statistics."""
        reason = self.attrs.get(semconv.SKIPPED)
        return None if reason is None else str(reason)

    @property
    def nonfinite(self) -> int:
        """How many of its values are NaN or infinite."""
        found = (self.stats or {}).get("nonfinite_count", 0)
        return found if isinstance(found, int) else 0

    def number(self, name: str) -> float | None:
        """A statistic; where NaN or infinite values hide it, that of the finite ones."""
        found = (self.stats or {}).get(name)
        if found is None:
            found = self._finite.get(name)
        return _float(found)

    @property
    def histogram(self) -> tuple[list[float], list[int]] | None:
        """Edges and counts, of the finite values where there are others too."""
        found = (self.stats or {}).get("histogram") or self._finite.get("histogram")
        if not isinstance(found, dict):
            return None
        bins, counts = found.get("bins"), found.get("counts")
        if not isinstance(bins, list) or not isinstance(counts, list) or not counts:
            return None
        edges = [edge for one in bins if (edge := _float(one)) is not None]
        if not all(isinstance(one, int) and one >= 0 for one in counts):
            return None
        return (edges, counts) if len(edges) == len(bins) == len(counts) + 1 else None

    @property
    def _finite(self) -> dict[str, Any]:
        found = (self.stats or {}).get("finite")
        return found if isinstance(found, dict) else {}


def _float(found: object) -> float | None:
    """A number of a foreign row; None for what is none, or is beyond a double."""
    try:
        return float(found) if isinstance(found, (int, float)) else None
    except OverflowError:
        return None


class _Span(msgspec.Struct, gc=False):
    id: str
    name: str
    parent_id: str | None = None
    index: int | None = None
    rank: int | None = None
    iteration: int | None = None
    attrs: dict[str, Any] = {}


class _Resource(msgspec.Struct, gc=False):
    session_id: Any = msgspec.field(default=None, name=semconv.SESSION_ID)


class _Batch(msgspec.Struct, gc=False):
    schema_version: int
    batch_id: str = ""
    spans: list[_Span] = []
    snapshots: list[Row] = []
    resource: _Resource | None = None


_decoder = msgspec.json.Decoder(_Batch)
_SNAPSHOT_BYTES = f'"{semconv.SNAPSHOT}"'.encode()
_EPOCH_BYTES = f'"{semconv.EPOCH}"'.encode()
_ROW_BYTES = b'"tensor_name"'


@dataclass(slots=True)
class Snapshot:
    """The rows of one scope: weights, gradients or both."""

    span_id: str
    session_id: str = ""
    ts_ns: int = 0
    rank: int = 0
    epoch: int | None = None
    #: Id of the epoch's scope.
    epoch_id: str | None = None
    iteration: int | None = None
    trigger: str = ""
    name: str | None = None
    rows: list[Row] = field(default_factory=list)

    @property
    def by_hand(self) -> bool:
        """Whether the program asked for it."""
        return self.trigger == "call"

    def of_kind(self, kind: str) -> list[Row]:
        """Its rows of one kind."""
        return [row for row in self.rows if row.kind == kind]

    @property
    def mode(self) -> str:
        """What its rows are: ``full`` or ``sampled`` where any has a file."""
        return next((row.mode for row in self.rows if row.mode != "stats"), "stats")


def load(
    spool: Spool, *, session: str | None = None, on_error: OnError | None = None
) -> list[Snapshot]:
    """The snapshots of a spool, oldest first; of sessions whose id begins with ``session``.

    Files that are no batches are passed over after ``on_error`` was told. Raises
    :class:`~cirron_otel.errors.SpoolError` when the directory cannot be listed.
    """
    found: dict[str, Snapshot] = {}
    spans: dict[str, _Span] = {}
    for batch in _batches(spool, on_error):
        for span in batch.spans:
            if span.name in {semconv.SNAPSHOT, semconv.EPOCH}:
                spans[span.id] = span
        owner = batch.resource.session_id if batch.resource is not None else None
        for row in batch.snapshots:
            one = found.get(row.span_id)
            if one is None:
                one = found[row.span_id] = Snapshot(row.span_id, str(owner or ""), row.ts_ns)
            one.ts_ns = min(one.ts_ns, row.ts_ns)
            one.rows.append(row)
    for one in found.values():
        _describe(one, spans)
    chosen = [
        one for one in found.values() if session is None or one.session_id.startswith(session)
    ]
    return sorted(chosen, key=lambda one: (one.ts_ns, one.span_id))


def _batches(spool: Spool, on_error: OnError | None) -> Iterator[_Batch]:
    """The batches that may have something of a snapshot, oldest first, each once."""
    seen: set[str] = set()
    for path in spool.files():
        try:
            batch = _batch(path)
        except SpoolError as exc:
            if on_error is not None:
                on_error(path, exc)
            continue
        if batch is None or batch.batch_id in seen:
            continue
        if batch.batch_id:
            seen.add(batch.batch_id)
        yield batch


def _batch(path: Path) -> _Batch | None:
    data = read(path)
    if data is None:
        return None
    if not (_ROW_BYTES in data or _SNAPSHOT_BYTES in data or _EPOCH_BYTES in data):
        return None
    try:
        batch = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise SpoolFormatError(str(exc)) from exc
    if batch.schema_version != SCHEMA_VERSION:
        raise SpoolFormatError(
            f"schema_version is {batch.schema_version}, this reader knows {SCHEMA_VERSION}"
        )
    return batch


def _describe(one: Snapshot, spans: dict[str, _Span]) -> None:
    """What the scope says; other writers' rows belong to the epoch itself."""
    span = spans.get(one.span_id)
    if span is None:
        return
    one.rank = span.rank or 0
    if span.name == semconv.EPOCH:
        one.epoch, one.epoch_id, one.trigger = span.index, span.id, "epoch_end"
        return
    attrs = span.attrs
    epoch = attrs.get(semconv.EPOCH_INDEX)
    one.epoch = epoch if isinstance(epoch, int) else None
    one.iteration = span.iteration
    one.trigger = str(attrs.get(semconv.SNAPSHOT_TRIGGER, ""))
    name = attrs.get(semconv.SNAPSHOT_NAME)
    one.name = None if name is None else str(name)
    if span.parent_id in spans:
        one.epoch_id = span.parent_id


# -- choosing ----------------------------------------------------------------------------------


def find(snapshots: Sequence[Snapshot], wanted: str) -> Snapshot:
    """The snapshot that ``wanted`` names; rows of one moment come together.

    ``wanted`` is the beginning of one scope's id, an epoch as ``epoch:3``, a label, or ``last``.
    For an epoch the last weights and the last gradients that were looked at of themselves are put
    together; one taken by hand is shown for itself. Raises :class:`NoSuchSnapshotError`.
    """
    if not snapshots:
        raise NoSuchSnapshotError("there are no snapshots: give ci.watch(model) the model")
    if wanted == "last":
        return _together(snapshots, snapshots[-1])
    if wanted.startswith("epoch:"):
        number = wanted.removeprefix("epoch:")
        of_epoch = [one for one in snapshots if str(one.epoch) == number]
        if not of_epoch:
            epochs = {one.epoch for one in snapshots if one.epoch is not None}
            known = ", ".join(map(str, sorted(epochs))) or "none"
            raise NoSuchSnapshotError(f"no snapshot is of epoch {number}; there are: {known}")
        return _together(snapshots, _of_itself(of_epoch))
    named = [one for one in snapshots if one.name == wanted]
    if named:
        return named[-1]
    found = [one for one in snapshots if one.span_id.startswith(wanted)] or [
        one for one in snapshots if one.epoch_id is not None and one.epoch_id.startswith(wanted)
    ]
    if not found:
        raise NoSuchSnapshotError(
            f"no snapshot begins with {wanted!r}, and none is called so; "
            "`cirron-otel traces snapshots` lists them"
        )
    if not found[0].span_id.startswith(wanted) and len({one.epoch_id for one in found}) == 1:
        return _together(snapshots, _of_itself(found))
    if len(found) > 1:
        ids = ", ".join(one.span_id for one in found[:5])
        raise NoSuchSnapshotError(f"{len(found)} snapshots begin with {wanted!r}: {ids}")
    return found[0]


def _of_itself(snapshots: Sequence[Snapshot]) -> Snapshot:
    """The newest that nobody asked for by hand, else the newest."""
    return next((one for one in reversed(snapshots) if not one.by_hand), snapshots[-1])


def _together(snapshots: Sequence[Snapshot], last: Snapshot) -> Snapshot:
    """``last`` with what else was taken of itself in its epoch, before it."""
    if last.epoch is None or last.by_hand:
        return last
    found: list[Snapshot] = []
    for one in reversed(snapshots[: snapshots.index(last) + 1]):
        if (one.epoch, one.session_id) != (last.epoch, last.session_id) or one.by_hand:
            continue
        # Another training of the session has an epoch of this number, too.
        if one.trigger == "epoch_end" and one.epoch_id != last.epoch_id:
            break
        found.insert(0, one)
    return _merged(found)


def _merged(found: Sequence[Snapshot]) -> Snapshot:
    """The newest row of each tensor, under the newest scope's name."""
    newest = found[-1]
    rows = {row.tensor_name: row for one in found for row in one.rows}
    return replace(newest, rows=list(rows.values()))


# -- as plain values ---------------------------------------------------------------------------


def table(snapshots: Iterable[Snapshot]) -> list[tuple[Any, ...]]:
    """One tuple for each row, in the order of :data:`COLUMNS`."""
    return [_cells(one, row) for one in snapshots for row in one.rows]


def _cells(one: Snapshot, row: Row) -> tuple[Any, ...]:
    histogram = row.histogram
    return (
        one.session_id, one.rank, one.span_id, one.epoch, one.iteration, one.trigger, one.name,
        row.ts_ns, row.kind, row.tensor_name, tuple(row.shape), row.dtype, row.mode,
        *(row.number(name) for name in ("mean", "std", "min", "max", "norm")), row.nonfinite,
        *((None, None) if histogram is None else histogram), row.skipped, row.blob_uri,
    )  # fmt: skip
