"""What torch compiles is seen, tagged, charged, and kept out of the lengths of steps."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.callback import callback_handler

import cirron_otel as ci
from cirron_otel import semconv
from cirron_otel.otlp.metrics import Totals
from helpers import read_spool

pytestmark = [
    pytest.mark.slow,  # for the compiler's import; in this process, which other tests share
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


def test_compiling() -> None:
    """The first step and the one of another shape compile: `warmup`; after it nothing is left."""
    torch.compiler.reset()
    callbacks = len(callback_handler.start_callbacks), len(callback_handler.end_callbacks)
    ci.profile(frameworks=["torch"], otlp="none", snapshots=None)
    model = torch.compile(torch.nn.Linear(8, 8), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in ci.epochs(range(1)):
        for batch in ci.batches([torch.ones(2, 8)] * 3 + [torch.ones(3, 8)] * 3):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    ci.shutdown()
    after = len(callback_handler.start_callbacks), len(callback_handler.end_callbacks)
    assert after == callbacks

    rows = read_spool()
    steps = rows.named("step")
    tagged = [step.iteration for step in steps if semconv.WARMUP in step.attrs]
    assert tagged == [0, 3]
    ids = {row.id: row for row in rows.spans}
    places = [ids[row.parent_id or ""] for row in rows.named(semconv.COMPILE)]
    assert {place.name for place in places} == {"forward"}
    assert {place.iteration for place in places} == {0, 3}
    compiled = sum(
        row.end_ns - row.start_ns
        for row in rows.named(semconv.COMPILE)
        if isinstance(row.end_ns, int)
    )
    said = rows.one(semconv.SESSION).attrs[f"{semconv.RUN_TIME}.compile"]
    assert said == pytest.approx(compiled / 1e9, abs=1e-5)

    totals = Totals.begin(rows.batches[0])
    for batch in rows.batches:
        totals.add(batch)
    by_name = {metric.instrument.name: metric for metric in totals.metrics()}
    (lengths,) = by_name[semconv.STEP_DURATION].points
    assert lengths.total == len(steps) - len(tagged)
    categories = {p.attrs[semconv.CATEGORY]: p.value for p in by_name[semconv.RUN_TIME].points}
    assert categories["compile"] == pytest.approx(said, abs=1e-5)
    (ended,) = by_name[semconv.RUN_OUTCOME].points
    assert (ended.attrs, ended.value) == ({semconv.OUTCOME: "completed"}, 1)
    assert semconv.LAST_STEP_TIME in by_name
