"""Findings reach a webhook, whatever it answers, and the program never waits for it."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

import cirron_otel as ci
from cirron_otel import recorder
from cirron_otel.errors import ConfigurationError
from cirron_otel.findings import Finding, report
from cirron_otel.webhook_line import LIMIT
from delivery.platform_server import PlatformServer
from delivery.receivers import until
from helpers import RunProgram

SPIKE = Finding("loss_spike", "warning", "the loss has jumped", "head", 7, {"value": 3.5})


@pytest.fixture(autouse=True)
def _no_proxy(_clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests go straight to the loopback."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture
def server() -> Iterator[PlatformServer]:
    """A receiver of webhooks on loopback."""
    with PlatformServer(default="200") as running:
        yield running


def _report(finding: Finding) -> None:
    report(recorder._current, finding)


def _health() -> dict[str, Any]:
    (found,) = ci.health()["findings"]["webhooks"]
    assert isinstance(found, dict)
    return found


def _posted(server: PlatformServer) -> list[dict[str, Any]]:
    return [json.loads(request.body) for request in server.requests]


def test_findings_are_posted_from_a_severity_on(server: PlatformServer) -> None:
    """Each with its text, its fields and its run; milder ones are left out."""
    hook = ci.webhook(f"{server.url}/hooks/secret", headers={"X-Team": "vision"})
    ci.profile(frameworks=[], run_id="night", on_finding=hook)
    _report(Finding("proven_dead", "info", "it is dead"))
    _report(SPIKE)
    until(lambda: _health()["delivered"] == 1)
    health = _health()
    ci.shutdown()
    (body,) = _posted(server)
    assert body["source"] == "cirron-otel"
    assert body["text"] == "warning: the loss has jumped (step 7) [run night, rank 0]"
    assert body["event"] == {
        "kind": "loss_spike", "severity": "warning", "message": "the loss has jumped",
        "layer": "head", "step": 7, "attributes": {"value": 3.5},
    }  # fmt: skip
    assert (body["run"]["id"], body["run"]["attempt"]) == ("night", 1)
    (request,) = server.requests
    assert request.path == "/hooks/secret"
    assert request.headers["x-team"] == "vision"
    assert request.headers["content-type"] == "application/json"
    assert (health["failures"], health["lost"], health["waiting"]) == (0, 0, 0)
    assert "secret" not in f"{health} {hook!r}"


def test_a_receiver_that_fails_is_tried_again(server: PlatformServer) -> None:
    """After 500, a reset and 429 the finding arrives, and those behind it in their order."""
    server.say(["500", "reset", "429:0.01"])
    ci.profile(frameworks=[], on_finding=[ci.webhook(server.url)])
    _report(SPIKE)
    _report(Finding("dead", "critical", "a layer is dead"))
    until(lambda: _health()["delivered"] == 2, timeout=40)
    assert [body["event"]["kind"] for body in _posted(server)[-2:]] == ["loss_spike", "dead"]
    assert (_health()["failures"], _health()["lost"]) == (3, 0)


def test_a_server_that_is_not_there_yet_gets_them_later(server: PlatformServer) -> None:
    """The port refuses at first."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    ci.profile(frameworks=[], on_finding=ci.webhook(f"http://127.0.0.1:{port}"))
    _report(SPIKE)
    until(lambda: _health()["failures"] > 0)
    assert _health()["last_error"] == "Connection refused; it is tried again"
    del server
    with PlatformServer(default="200", port=port) as late:
        until(lambda: _health()["delivered"] == 1, timeout=40)
        assert len(late.requests) == 1


def test_what_is_refused_for_good_is_counted(server: PlatformServer) -> None:
    """A 400, and a body that cannot be made, are lost with a reason; the next finding arrives."""
    server.say(["400"])

    def body(finding: Finding) -> object:
        if finding.layer is None:
            raise ValueError("no layer")
        return {"content": finding.message}

    ci.profile(frameworks=[], on_finding=ci.webhook(server.url, body=body))
    for finding in (SPIKE, Finding("dead", "critical", "no layer"), SPIKE):
        _report(finding)
    until(lambda: _health()["delivered"] == 1)
    health = ci.health()
    assert health["losses"] == {"webhook_rejected": 2}
    assert _posted(server) == [{"content": SPIKE.message}] * 2


def test_a_full_queue_keeps_the_first_findings(server: PlatformServer) -> None:
    """While the receiver hangs a bounded number waits; later ones are counted."""
    server.default = "hang"
    ci.profile(frameworks=[], exit_budget=0.0, on_finding=ci.webhook(server.url, timeout=30))
    _report(SPIKE)
    until(lambda: len(server.requests) == 1)
    for number in range(LIMIT + 5):
        _report(Finding("dead", "critical", str(number)))
    assert ci.health()["losses"] == {"webhook_queue_full": 5}
    assert _health()["waiting"] == LIMIT + 1
    ci.shutdown()
    assert ci.health()["enabled"] is False


def test_an_end_waits_for_what_is_on_its_way(server: PlatformServer) -> None:
    """shutdown() has what waits sent, past a pause; afterwards a new recording goes on."""
    hook = ci.webhook(server.url)
    for _ in range(2):
        server.say(["503"])
        ci.profile(frameworks=[], exit_budget=30.0, on_finding=hook)
        _report(SPIKE)
        ci.shutdown()
    assert len(_posted(server)) == 4
    hook(SPIKE)  # without a recording
    until(lambda: hook.health()["delivered"] == 3)
    assert _posted(server)[-1]["run"] is None
    hook.end(time.monotonic() + 30)


PROGRAM = """
import sys, urllib3
import cirron_otel as ci
from cirron_otel import recorder
from cirron_otel.findings import Finding, report
from opentelemetry.instrumentation.urllib3 import URLLib3Instrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

seen = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(seen))
URLLib3Instrumentor().instrument(tracer_provider=provider)
profiler = ci.profile(frameworks=[])
report(recorder._current, Finding("dead", "critical", "first"))
import os
child = os.fork()
if child == 0:
    report(recorder._current, Finding("dead", "critical", "child"))
    os._exit(0)
os.waitpid(child, 0)
report(recorder._current, Finding("dead", "critical", "last"))
import atexit
atexit.register(lambda: print([span.name for span in seen.get_finished_spans()]))
print(profiler.settings)
"""


def test_a_setting_is_enough_and_the_end_of_the_program_sends_all(
    server: PlatformServer, run_program: RunProgram
) -> None:
    """CIRRON_WEBHOOK: what is found last, and in a forked child, arrives; nothing is traced."""
    run = run_program(
        PROGRAM, {"CIRRON_WEBHOOK": f"{server.url}/hooks/secret", "CIRRON_EXIT_BUDGET": "30"}
    )
    told = sorted(body["event"]["message"] for body in _posted(server))
    assert told in (["child", "first", "last"], ["first", "last"])
    assert run.stdout.splitlines()[-1] == "[]"
    assert "secret" not in run.stdout + run.stderr


def test_a_receiver_that_hangs_does_not_hold_the_end(
    server: PlatformServer, run_program: RunProgram
) -> None:
    """The program ends within its budget, and says what was not sent."""
    server.default = "hang"
    run = run_program(PROGRAM, {"CIRRON_WEBHOOK": server.url, "CIRRON_EXIT_BUDGET": "0.2"})
    assert "2 of the findings could not be sent" in run.stderr
    assert len({row.name for row in run.marks}) == 1


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("hooks.example/secret", {}),
        ("ftp://hooks.example/secret", {}),
        (3, {}),
        ("http://hooks.example", {"min_severity": "bad"}),
        ("http://hooks.example", {"headers": {"a": 1}}),
        ("http://hooks.example", {"body": "text"}),
        ("http://hooks.example", {"timeout": 0}),
        ("https://hooks.example", {"certificate": "nowhere.pem"}),
    ],
)
def test_what_cannot_be_used_is_said_at_once(url: Any, options: dict[str, Any]) -> None:
    """By webhook() itself, without the path of the URL, which is a key."""
    with pytest.raises(ConfigurationError) as told:
        ci.webhook(url, **options)
    assert "secret" not in str(told.value)


def test_a_wrong_setting_is_said_by_profile() -> None:
    """Without the URL."""
    with pytest.raises(ConfigurationError, match="webhook") as told:
        ci.profile(config={"webhook": "hooks.example/secret"})
    assert "secret" not in str(told.value)
