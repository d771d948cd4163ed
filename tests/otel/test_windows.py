"""No trace grows past its budget: steps go into linked window traces, ids stay as they are."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

import cirron_otel as ci
from helpers import Rows

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan


def check_traces(spans: list[ReadableSpan], limit: int) -> dict[int, list[ReadableSpan]]:
    """Every trace is within the limit and complete; returns them by trace id."""
    traces: dict[int, list[ReadableSpan]] = defaultdict(list)
    for span in spans:
        traces[span.context.trace_id].append(span)
    for members in traces.values():
        assert len(members) <= limit
        ids = {span.context.span_id for span in members}
        roots = [span for span in members if span.parent is None]
        assert len(roots) == 1
        for span in members:
            assert span.parent is None or span.parent.span_id in ids
            assert span.parent is None or span.parent.trace_id == span.context.trace_id
    return traces


def check_ids(rows: Rows, spans: list[ReadableSpan]) -> None:
    """Spool rows and exported spans name one another rightly."""
    by_span_id = {f"{span.context.span_id:016x}": span for span in spans}
    known = {row.id for row in rows.spans}
    for row in [*rows.spans, *rows.windows]:
        span = by_span_id[row.id[:16]]
        assert row.otel.trace_id + row.id[16:] == f"{span.context.trace_id:032x}"
        if span.parent is None:
            continue
        assert row.parent_id in known
        above = f"{span.parent.span_id:016x}"
        if row.parent_id[:16] == above:
            assert row.otel.parent_span_id in (above, UNSET)
            assert "cirron.parent.id" not in span.attributes
        else:
            assert row.otel.parent_span_id == above
            named = span.attributes.get("cirron.parent.id")
            if named is None:  # then the window's root is linked to it, first of all
                root = by_span_id[above]
                named = f"{root.links[0].context.span_id:016x}"
            assert named[:16] == row.parent_id[:16]


def test_steps_go_into_windows(way: Any, named: Any) -> None:
    """A run of 200 steps of four spans, budget 50: many small traces, one whole tree."""
    way.start(trace_max_spans=50)
    for _ in ci.epochs(range(2)):
        for _ in ci.batches(range(100)):
            with ci.scope("forward"), ci.scope("inner"):
                pass
            ci.mark("loss", 0.5)
    spans = way.finish()
    rows = way.rows()
    traces = check_traces(spans, 50)
    check_ids(rows, spans)
    counts = Counter(row.name for row in rows.spans)
    inside = dict.fromkeys(("step", "data_load", "forward", "inner"), 200)
    assert counts == {"cirron.session": 1, "epoch": 2, **inside}
    session = named(spans, "cirron.session")
    epochs = {span.context.span_id for span in spans if span.name == "epoch"}
    own = {span.name for span in traces[session.context.trace_id]}
    assert {"cirron.session", "epoch", "step"} <= own
    roots = [
        members for trace_id, members in traces.items() if trace_id != session.context.trace_id
    ]
    assert len(roots) >= 13
    steps: list[int] = []
    for members in roots:
        (root,) = [span for span in members if span.parent is None]
        linked = {link.context.span_id for link in root.links}
        assert session.context.span_id in linked
        assert linked & epochs
        assert root.name.startswith("steps[")
        first, _, last = root.name[6:-1].partition("..")
        inside = sorted(span.attributes["dl.iteration"] for span in members if span.name == "step")
        assert (int(first), int(last)) == (inside[0], inside[-1])
        assert root.end_time >= max(span.end_time for span in members)
        steps += inside
    assert len(steps) == len(set(steps))
    for row in rows.named("step"):
        assert row.parent_id in {epoch.id for epoch in rows.named("epoch")}
    for row in rows.named("inner"):
        assert row.parent_id in {one.id for one in rows.named("forward")}


def test_windows_are_in_the_spool_open_and_closed(way: Any) -> None:
    """The root of a window is announced under ``open`` and, closed, stands under ``windows``."""
    way.start(trace_max_spans=20)
    with ci.scope("epoch"):
        for _ in range(3):
            for _ in range(15):
                with ci.scope("work"):
                    pass
            ci.flush()
    spans = way.finish()
    rows = way.rows()
    closed = {row.id: row for row in rows.windows}
    assert len(closed) == len(rows.windows) >= 2
    announced = {
        row.id: row for batch in rows.batches for row in batch.open or [] if row.id in closed
    }
    assert announced
    for row in announced.values():
        assert row.otel.window is True
        assert row.name.endswith("..]")
    for row in closed.values():
        assert row.end_ns >= row.start_ns
        assert row.parent_id is None
        assert row.otel.window is True
        assert not row.name.endswith("..]")
        assert len(row.otel.links) == 2
    exported = {f"{span.context.span_id:016x}" for span in spans}
    assert {row_id[:16] for row_id in closed} <= exported


def test_flat_scopes_overflow_too(way: Any) -> None:
    """Scopes that are no steps, right under the session, fill windows just the same."""
    way.start(trace_max_spans=50)
    for i in range(300):
        with ci.scope("request", index=i), ci.scope("part"):
            pass
    spans = way.finish()
    rows = way.rows()
    check_traces(spans, 50)
    check_ids(rows, spans)
    assert len(rows.named("request")) == len(rows.named("part")) == 300
    (session,) = rows.named("cirron.session")
    assert {row.parent_id for row in rows.named("request")} == {session.id}
    requests = {row.id for row in rows.named("request")}
    assert {row.parent_id for row in rows.named("part")} == requests
    roots = [span for span in spans if span.parent is None and span.name != "cirron.session"]
    assert all(root.name.startswith(("requests[", "parts[")) for root in roots)
    assert sum(root.name.startswith("requests[") for root in roots) >= 10
    assert {row.id for row in rows.windows} == {
        row.id for row in rows.windows if isinstance(row.end_ns, int)
    }
    assert {row.id[:16] for row in rows.windows} == {
        f"{root.context.span_id:016x}" for root in roots
    }


def test_one_deep_scope_with_many_children(way: Any) -> None:
    """A single scope with more children than the budget spreads them over windows."""
    way.start(trace_max_spans=50)
    with ci.scope("a"), ci.scope("b"):
        for _ in range(200):
            with ci.scope("leaf"):
                pass
    spans = way.finish()
    rows = way.rows()
    check_traces(spans, 50)
    check_ids(rows, spans)
    assert {row.parent_id for row in rows.named("leaf")} == {rows.one("b").id}
