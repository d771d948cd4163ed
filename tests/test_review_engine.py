"""Faults that a review found in the engine, each held by a test."""

from __future__ import annotations

import gc
import threading

import torch
from opentelemetry import trace

import cirron_otel as ci
from helpers import read_spool


def test_an_attribute_set_inside_a_phase_stays_there() -> None:
    """What is set on the current span during a forward is not on the next one, nor on a mark."""
    ci.profile()
    model = torch.nn.Linear(2, 2)

    class Labels(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            trace.get_current_span().set_attribute("once", 1)
            return x

    labels = Labels()
    labels(torch.zeros(2))
    model(torch.zeros(2))
    ci.mark("m", 1)
    with ci.scope("plain"):
        pass
    ci.shutdown()
    rows = read_spool()
    assert [row.attrs for row in rows.named("forward")] == [
        {"mode": "train", "once": 1},
        {"mode": "train"},
    ]
    assert rows.one("plain").attrs == {}
    assert [mark.attrs for mark in rows.marks if mark.name == "m"] == [{}]


def test_threads_that_fill_a_window_together_leave_none_open() -> None:
    """Eight threads overflow one trace at once: every window root is closed and written."""
    ci.profile(frameworks=[], trace_max_spans=20)
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        for number in range(300):
            with ci.scope("work", index=number):
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ci.shutdown()
    rows = read_spool()
    assert len(rows.named("work")) == 2400
    announced = {
        row.id
        for batch in rows.batches
        for row in batch.open or []
        if row.otel and row.otel.window is True
    }
    closed = {row.id for row in rows.windows}
    assert announced <= closed
    parents = {row.otel.parent_span_id for row in rows.named("work") if row.otel.parent_span_id}
    assert parents <= {row_id[:16] for row_id in closed}


def test_a_scope_that_never_opened_can_be_asked() -> None:
    """Too deep to be recorded, it has no id, and its context is invalid; nothing is raised."""
    ci.profile(frameworks=[])
    held = [ci.scope("d", index=number).__enter__() for number in range(70)]
    last = held[-1]
    assert (last.id, last.iteration, last.end_ns) == (None, None, 0)
    assert not last.get_span_context().is_valid
    for scope in reversed(held):
        scope.__exit__(None, None, None)


def test_a_pass_of_a_thread_that_ended_is_settled() -> None:
    """Its iterator is collected after the thread has gone: marks are quick again, nothing hangs."""
    ci.profile()
    kept = []

    def half() -> None:
        iterator = iter(torch.utils.data.DataLoader([1, 2, 3]))
        next(iterator)
        ci.mark("seen", 1)
        kept.append(iterator)

    thread = threading.Thread(target=half)
    thread.start()
    thread.join()
    kept.clear()
    gc.collect()
    ci.mark("after", 1)
    from cirron_otel import recorder  # noqa: PLC0415 - the engine's state is what is looked at

    assert recorder._current is not None
    assert not recorder._current.pending
    ci.shutdown()
    (step,) = read_spool().named("step")
    assert step.end_ns >= step.start_ns
