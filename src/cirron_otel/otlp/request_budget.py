"""Which requests of a service leave: a share of them, so many of each tenant, and what is wrong.

It is decided when a request has ended, for it and everything below it. One that failed, or was
slower than nearly all of its kind, always goes. Of the others goes the share that ``ratio`` says
(the caller's word counts first: what it sampled is not thinned out again), of each tenant at most
``tenant_rate`` a second, and altogether what the export budget has room for. Metrics count every
request, and the spool has everything.

What ends before its request does is held here until it is known whether the request goes. Only
where nothing has to be thinned out it goes at once.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import UNSET

from cirron_otel import semconv
from cirron_otel.batch import Batch, SpanRecord
from cirron_otel.otlp.batches import is_request
from cirron_otel.otlp.budget import Budget
from cirron_otel.otlp.rows import OtlpSpan

#: Open requests, and spans in all, that are held for.
_MAX_HELD_REQUESTS, _MAX_HELD = 10_000, 50_000
_MAX_DECIDED = 20_000
_MAX_TENANTS = 10_000
#: Seconds of a tenant's rate that may go at once.
_BURST_S = 10.0
#: Kinds of requests whose lengths are known, the last of each, the fewest that say what is slow.
_MAX_KINDS, _LENGTHS, _FEWEST = 200, 1000, 100
_SLOW = 0.99
_MAX_DEPTH = 64
_HASHED = 1 << 64


class Place(Protocol):
    """What is asked of a scope's place in the tree."""

    @property
    def name(self) -> str:
        """The scope's name."""

    @property
    def parent_id(self) -> str | None:
        """The spool id of the scope above."""


class Judged:
    """What becomes of the rows of one batch."""

    __slots__ = ("held", "in_requests", "left_out")

    def __init__(self) -> None:
        self.in_requests: set[str] = set()
        self.left_out: set[str] = set()
        #: Rows that have to wait, and the request that each waits for.
        self.held: dict[str, str] = {}


class RequestBudget:
    """Decides for the requests of batches that come in order. Not thread-safe, no I/O.

    ``ratio`` is from 0 to 1, ``tenant_rate`` in requests a second of each tenant, 0 is no limit.
    """

    def __init__(self, budget: Budget, *, ratio: float = 1.0, tenant_rate: float = 0.0) -> None:
        self._budget = budget
        self._ratio = ratio
        self._tenant_rate = tenant_rate
        self._decided: OrderedDict[str, bool] = OrderedDict()
        #: By request, then by span: a batch may be given a second time.
        self._held: OrderedDict[str, dict[str, OtlpSpan]] = OrderedDict()
        self._held_count = 0
        #: What could not be held, by its request.
        self._lost: dict[str, int] = {}
        self._tenants: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._kinds: OrderedDict[tuple[str, str], _Lengths] = OrderedDict()

    @property
    def limits(self) -> bool:
        """Whether requests are thinned out whatever the export budget says."""
        return self._ratio < 1 or self._tenant_rate > 0

    def waits(self, row_id: str, places: Mapping[str, Place]) -> bool:
        """Whether a scope lies in a request of which nobody knows yet whether it goes."""
        return self.limits and _request_of(row_id, places, {None: None}) is not None

    # --- judging -------------------------------------------------------------------------------

    def judge(self, batch: Batch, places: Mapping[str, Place]) -> Judged:
        """What becomes of the rows of a batch that lie in requests."""
        judged = Judged()
        if not self.limits and self._budget.rate <= 0:
            return judged
        groups: dict[str, list[SpanRecord]] = {}
        known: dict[str | None, str | None] = {None: None}
        for row in batch.spans:
            if row.iteration is UNSET:
                above = _request_of(row.id, places, known)
                if above is not None:
                    groups.setdefault(above, []).append(row)
        for request_id, rows in groups.items():
            judged.in_requests.update(row.id for row in rows)
            goes = self._verdict(request_id, rows)
            if goes is None:
                judged.held.update((row.id, request_id) for row in rows)
            elif goes:
                self._budget.take(len(rows))
            else:
                judged.left_out.update(row.id for row in rows)
                self._budget.left_out += len(rows)
        return judged

    def _verdict(self, request_id: str, rows: Sequence[SpanRecord]) -> bool | None:
        decided = self._decided.get(request_id)
        if decided is not None:
            return decided
        request = next((row for row in rows if row.id == request_id), None)
        if request is None or request.end_ns is UNSET:
            # It is not over, so nobody knows how it will end.
            at_ns = rows[-1].start_ns if rows[-1].end_ns is UNSET else rows[-1].end_ns
            if self.limits or not self._budget.has_room(len(rows), at_ns):
                return None
            return self._decide(request_id, goes=True)
        kind = self._kind(request)
        length = request.end_ns - request.start_ns
        goes = (
            any(map(_failed, rows))
            or kind.is_slow(length)
            or self._fits(request, len(rows) + len(self._held.get(request_id, ())))
        )
        kind.note(length)
        if goes:
            self._budget.take(len(self._held.get(request_id, ())))
        else:
            self._budget.left_out += len(self._forget(request_id))
        return self._decide(request_id, goes=goes)

    def _decide(self, request_id: str, *, goes: bool) -> bool:
        self._decided[request_id] = goes
        if len(self._decided) > _MAX_DECIDED:
            self._decided.popitem(last=False)
        return goes

    def _fits(self, request: SpanRecord, spans: int) -> bool:
        assert request.end_ns is not UNSET  # noqa: S101 - for the type checker; it has ended
        if self._ratio < 1 and not _called(request) and not self._in_share(request):
            return False
        if not self._budget.has_room(spans, request.end_ns):
            return False
        tenant = request.attrs.get(semconv.TENANT)
        return not (
            self._tenant_rate > 0
            and isinstance(tenant, str)
            and not self._tenant_has_room(tenant, request.end_ns)
        )

    def _in_share(self, request: SpanRecord) -> bool:
        """Whether the request is in the share; its trace decides, the same everywhere."""
        digest = hashlib.blake2b(request.id[16:].encode(), digest_size=8).digest()
        return int.from_bytes(digest) < self._ratio * _HASHED

    def _tenant_has_room(self, tenant: str, now_ns: int) -> bool:
        most = max(1.0, self._tenant_rate * _BURST_S)
        tokens, filled_ns = self._tenants.pop(tenant, (most, now_ns))
        passed_s = max(0, now_ns - filled_ns) / 1e9
        tokens = min(most, tokens + passed_s * self._tenant_rate)
        room = tokens >= 1
        self._tenants[tenant] = (tokens - room, max(now_ns, filled_ns))
        if len(self._tenants) > _MAX_TENANTS:
            self._tenants.popitem(last=False)
        return room

    def _kind(self, request: SpanRecord) -> _Lengths:
        key = (
            str(request.attrs.get(semconv.GEN_AI_OPERATION)),
            str(request.attrs.get(semconv.GEN_AI_REQUEST_MODEL)),
        )
        kind = self._kinds.pop(key, None) or _Lengths()
        self._kinds[key] = kind
        if len(self._kinds) > _MAX_KINDS:
            self._kinds.popitem(last=False)
        return kind

    # --- holding -------------------------------------------------------------------------------

    def hold(self, request_id: str, span: OtlpSpan) -> None:
        """Keep a span until its request has ended; the oldest go when there are too many."""
        spans = self._held.setdefault(request_id, {})
        self._held_count += span.span_id not in spans
        spans[span.span_id] = span
        while self._held_count > _MAX_HELD or len(self._held) > _MAX_HELD_REQUESTS:
            oldest = next(iter(self._held))
            lost = len(self._forget(oldest))
            self._budget.left_out += lost
            self._lost[oldest] = self._lost.get(oldest, 0) + lost
            if len(self._lost) > _MAX_HELD_REQUESTS:
                del self._lost[next(iter(self._lost))]

    def release(self, row: SpanRecord, span: OtlpSpan) -> list[OtlpSpan]:
        """What was held for a request that goes; ``span``, its own, says what is missing."""
        lost = self._lost.pop(row.id, 0)
        if lost:
            span.attrs = {**span.attrs, semconv.LEFT_OUT_SPANS: lost}
        return self._forget(row.id)

    def _forget(self, request_id: str) -> list[OtlpSpan]:
        spans = list(self._held.pop(request_id, {}).values())
        self._held_count -= len(spans)
        return spans


class _Lengths:
    """The lengths of the last requests of one kind."""

    __slots__ = ("_last", "_noted", "_slow_ns")

    def __init__(self) -> None:
        self._last: deque[int] = deque(maxlen=_LENGTHS)
        self._noted = 0
        self._slow_ns: int | None = None

    def is_slow(self, length_ns: int) -> bool:
        return self._slow_ns is not None and length_ns > self._slow_ns

    def note(self, length_ns: int) -> None:
        self._last.append(length_ns)
        self._noted += 1
        if self._noted % _FEWEST == 0:
            self._slow_ns = sorted(self._last)[int(_SLOW * (len(self._last) - 1))]


def _request_of(
    row_id: str, places: Mapping[str, Place], known: dict[str | None, str | None]
) -> str | None:
    """The outermost request that a scope lies in, itself included."""
    path: list[str] = []
    at: str | None = row_id
    while at is not None and at not in known and len(path) < _MAX_DEPTH:
        path.append(at)
        place = places.get(at)
        at = None if place is None else place.parent_id
    found = known.get(at)
    for one in reversed(path):
        place = places.get(one)
        if found is None and place is not None and _is_request(place):
            found = one
        known[one] = found
    return found


def _is_request(place: Place) -> bool:
    return is_request(place) if isinstance(place, SpanRecord) else place.name == semconv.REQUEST


def _called(request: SpanRecord) -> bool:
    """Whether the request is in its caller's trace, which was sampled there."""
    if request.otel is UNSET or request.otel.parent_span_id is UNSET:
        return False
    return bool(request.otel.parent_span_id)


def _failed(row: Any) -> bool:  # noqa: ANN401 - a row
    return row.otel is not UNSET and row.otel.status == "error"
