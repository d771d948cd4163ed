"""Which requests leave when not all may: a share, so many of each tenant, and all that is wrong."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import cirron_otel as ci
from cirron_otel.batch import Batch, SpanOtel, SpanRecord
from cirron_otel.destinations.base import Accepted, Parcel
from cirron_otel.destinations.otlp import OtlpDestination
from cirron_otel.destinations.otlp_settings import OtlpTarget
from cirron_otel.errors import ConfigurationError
from cirron_otel.otlp.budget import Budget
from cirron_otel.otlp.gathering import Gatherer
from cirron_otel.otlp.request_budget import RequestBudget
from cirron_otel.otlp.rows import OtlpSpan
from delivery.otlp_server import attributes, http_receiver
from helpers import read_spool
from spool_by_hand import hex32, span

CHAT = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai"}
SESSION = span("s/0", "cirron.session", None, 0, None)


def request(i: int, *, ms: float = 5, at: float | None = None, **more: Any) -> list[SpanRecord]:
    """A request with two scopes below it, children first; ``more`` are attributes."""
    begun = 10.0 * i if at is None else at
    otel = more.pop("otel", SpanOtel("1" * 16, ""))
    key = f"r{i}/t{i}"
    return [
        span(f"r{i}.a/t{i}", "tokenize", key, begun, begun + 1),
        span(f"r{i}.b/t{i}", "model", key, begun + 1, begun + 2),
        span(key, "request", "s/0", begun, begun + ms, otel=otel, attrs={**CHAT, **more}),
    ]


def batch(at: float, rows: list[SpanRecord], still: list[SpanRecord] | None = None) -> Batch:
    """A batch of one session."""
    made = Batch(1, "9", hex32(f"b{at}"), round(at), list(rows), [])
    made.resource = {"cirron.session.id": hex32("s/0")}
    made.open = [SESSION, *(still or [])]
    made.writer = "host-1-1"
    return made


def gatherer(rate: float = 0, burst: int = 0, **limits: Any) -> Gatherer:
    """The spans to export under these limits."""
    budget = Budget(rate, burst)
    return Gatherer(budget=budget, requests=RequestBudget(budget, **limits))


def sent(one: Gatherer, *batches: Batch) -> list[OtlpSpan]:
    """What goes of these batches."""
    return [made for given in batches for made in one.spans(given)]


def whole(spans: list[OtlpSpan]) -> int:
    """How many requests these are; each has to be there whole."""
    counts = Counter(made.name for made in spans)
    assert counts["chat"] == counts["tokenize"] == counts["model"] == len(spans) / 3
    return counts["chat"]


def test_without_limits_every_request_goes() -> None:
    """By default, and as long as the budget has room, nothing is left out and nothing waits."""
    rows = [row for i in range(500) for row in request(i)]
    assert whole(sent(gatherer(), batch(1, rows))) == 500
    assert whole(sent(gatherer(200, 20_000), batch(1, rows))) == 500


def test_a_share_of_the_requests_goes_whole() -> None:
    """A tenth is about a tenth, each with all below it, and the same ones whoever asks."""
    rows = [row for i in range(2000) for row in request(i)]
    first = sent(gatherer(ratio=0.1), batch(1, rows))
    assert 140 <= whole(first) <= 260
    again = sent(gatherer(ratio=0.1), batch(1, rows))
    assert [made.span_id for made in first] == [made.span_id for made in again]
    assert whole(sent(gatherer(ratio=0), batch(1, rows))) == 0


def test_errors_and_slow_requests_go_anyway() -> None:
    """What failed, what failed inside, and what was slower than nearly all of its kind."""
    rows = [row for i in range(200) for row in request(i)]
    odd = [
        *request(300, otel=SpanOtel("1" * 16, "", status="error")),
        *request(301, ms=400),
        *request(302),
        *request(303),
    ]
    odd[-2].otel = SpanOtel("1" * 16, status="error")  # the model's scope of the last one
    one = gatherer(ratio=0)
    assert whole(sent(one, batch(1, rows), batch(2, odd))) == 3


def test_kinds_of_requests_are_not_compared() -> None:
    """A long chat is not slow because embeddings are short."""
    short = [row for i in range(300) for row in request(i, **{"gen_ai.operation.name": "embed"})]
    long = [row for i in range(300, 320) for row in request(i, ms=400)]
    one = gatherer(ratio=0)
    assert sent(one, batch(1, short), batch(2, long)) == []


def test_requests_of_another_name_are_limited_too() -> None:
    """What a service calls its requests does not take them out of a limit, open or ended."""
    rows = [row for i in range(200) for row in request(i, request_id=f"r{i}")]
    for row in rows:
        row.name = "rank" if row.name == "request" else row.name
    first = [row for row in rows if row.name != "rank"]
    still = [row for row in rows if row.name == "rank"]
    for ended, begun in ((rows, []), (first, still)):
        one = gatherer(ratio=0.0)
        assert sent(one, batch(1, ended, begun), batch(2, begun)) == []


def test_what_a_caller_sampled_is_not_thinned_out_again() -> None:
    """A request in its caller's trace goes: the share was chosen there."""
    called = SpanOtel("1" * 16, "b7ad6b7169203331")
    rows = [row for i in range(50) for row in request(i, otel=called)]
    assert whole(sent(gatherer(ratio=0), batch(1, rows))) == 50


def test_each_tenant_has_a_limit_of_its_own() -> None:
    """One that asks a hundred times a second goes twice a second; another one all the time."""
    rows: list[SpanRecord] = []
    for i in range(3000):  # thirty seconds
        rows += request(i, **{"cirron.tenant": "loud" if i % 100 else "quiet"})
    spans = sent(gatherer(tenant_rate=2), batch(1, rows))
    tenants = Counter(made.attrs.get("cirron.tenant") for made in spans if made.name == "chat")
    assert tenants["quiet"] == 30
    assert 75 <= tenants["loud"] <= 85  # what may go at once, and two a second
    whole(spans)


def test_the_export_budget_holds_for_requests() -> None:
    """Past the budget requests go whole, as many as there is room for, and errors on credit."""
    rows = [row for i in range(2000) for row in request(i)]  # 300 spans a second
    rows += request(2000, otel=SpanOtel("1" * 16, "", status="error"))
    one = gatherer(rate=30, burst=300)
    spans = sent(one, *(batch(k, rows[k * 300 : (k + 1) * 300]) for k in range(21)))
    assert 290 <= whole(spans) <= 310  # a hundred at once, then ten a second
    assert spans[-1].span_id == rows[-1].id[:16]
    assert one.budget is not None
    assert one.budget.left_out == len(rows) - len(spans)


def test_what_ends_early_waits_for_its_request() -> None:
    """Scopes of a long request go with it, or not at all, however many batches lie in between."""
    for keep in (True, False):
        tokenize, model, done = request(
            7, otel=SpanOtel("1" * 16, "", status="error" if keep else "ok")
        )
        still = span("r7/t7", "request", "s/0", 70, None)
        one = gatherer(ratio=0)
        assert sent(one, batch(1, [tokenize], [still]), batch(2, [model], [still])) == []
        spans = sent(one, batch(3, [done]))
        assert [made.name for made in spans] == (["tokenize", "model", "chat"] if keep else [])
        assert one.budget is not None
        assert one.budget.left_out == (0 if keep else 3)


def test_requests_in_requests_go_with_the_outermost() -> None:
    """A request inside another is a part of it, and so is what is below."""
    tokenize, model, outer = request(1, otel=SpanOtel("1" * 16, "", status="error"))
    inner = span("i/t1", "request", "r1/t1", 11, 12, attrs=CHAT)
    below = span("j/t1", "model", "i/t1", 11, 12)
    one = gatherer(ratio=0)
    assert len(sent(one, batch(1, [below, inner, tokenize, model, outer]))) == 5


def test_a_batch_that_comes_twice_is_held_once(tmp_path: Path) -> None:
    """What waits for its request is sent once, though its batch was given again."""
    tokenize, model, done = request(3, otel=SpanOtel("1" * 16, "", status="error"))
    still = span("r3/t3", "request", "s/0", 30, None)
    budget = Budget(0, 0)
    limits = RequestBudget(budget, ratio=0)
    early = batch(1, [tokenize, model], [still])
    for _ in range(2):
        assert sent(Gatherer(budget=budget, requests=limits), early) == []
    spans = sent(Gatherer(budget=budget, requests=limits), batch(2, [done]))
    assert sorted(made.name for made in spans) == ["chat", "model", "tokenize"]
    assert tmp_path.exists()


def test_training_is_not_touched() -> None:
    """Steps and what stands under no request go as if there were no limit for requests."""
    rows = [
        span("f/0", "forward", "step/0", 0, 5, iteration=1),
        span("step/0", "step", "s/0", 0, 9, iteration=1),
        span("save/0", "checkpoint", "s/0", 10, 20),
    ]
    assert len(sent(gatherer(ratio=0), batch(1, rows))) == 3


def test_a_services_setting_reaches_its_receiver(tmp_path: Path) -> None:
    """With profile(request_sample_ratio=0) only the failed request arrives; the spool has both."""
    with http_receiver() as server:
        ci.profile(frameworks=[], otlp=server.url, exit_budget=30, request_sample_ratio=0)
        with ci.request(operation="chat"), ci.scope("model"):
            pass
        with pytest.raises(TimeoutError), ci.request(operation="chat"), ci.scope("model"):
            raise TimeoutError
        ci.shutdown()
        names = sorted(made.name for made in server.spans.values())
        durations = server.points("gen_ai.server.request.duration")
        chat = next(made for made in server.spans.values() if made.name == "chat")
    assert [name for name in names if "(open)" not in name] == ["chat", "cirron.session", "model"]
    assert attributes(chat.attributes)["error.type"] == "TimeoutError"
    assert sum(point.count for _, point in durations) == 2
    assert len(read_spool(tmp_path / ".cirron").named("request")) == 2


def test_a_destination_is_told_the_limits(tmp_path: Path) -> None:
    """What a receiver's settings say is what its requests are judged by."""
    ci.profile(frameworks=[])
    for _ in range(20):
        with ci.request(operation="chat", **{"cirron.tenant": "a"}):
            pass
    ci.shutdown()
    with http_receiver() as server:
        target = OtlpTarget(url=f"{server.url}/v1/traces", tenant_rate=0.5)
        destination = OtlpDestination(target, pending=False)
        for file in sorted(tmp_path.glob(".cirron/spool/*.json")):
            assert destination.send(Parcel.read(file)) == Accepted()
        assert destination.left_out_spans == 15
        destination.close()
        assert sum(made.name == "chat" for made in server.spans.values()) == 5


@pytest.mark.parametrize(
    ("setting", "value"),
    [("request_sample_ratio", 1.1), ("request_sample_ratio", "x"), ("tenant_rate", -1)],
)
def test_settings_that_cannot_be_used_are_refused(setting: str, value: Any) -> None:
    """profile() says what is wrong with a limit before it has any effect."""
    with pytest.raises(ConfigurationError, match=setting):
        ci.profile(frameworks=[], **{setting: value})
