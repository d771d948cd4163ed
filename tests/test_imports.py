"""What a program loads that records and delivers nowhere."""

from __future__ import annotations

import json

import pytest

from helpers import RunProgram

PROGRAM = """
import json, sys
import cirron_otel as ci
ci.profile(frameworks=[])
with ci.scope("work"):
    ci.mark("loss", 0.5)
ci.flush()
print(json.dumps(sorted(sys.modules)))
ci.shutdown()
"""
#: What only delivery needs; what is under one of them counts too.
DELIVERY = (
    "urllib3",
    "grpc",
    "google.protobuf",
    "cirron_otel.courier",
    "cirron_otel.forward_process",
    "cirron_otel.forwarder",
    "cirron_otel.otlp",
)


def _of_delivery(modules: list[str]) -> set[str]:
    found = {name for name in modules if f"{name}.".startswith(tuple(f"{d}." for d in DELIVERY))}
    return found | {
        name for name in modules
        if name.startswith("cirron_otel.destinations.") and not name.endswith(".base")
    }  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "loads"),
    [
        ({}, False),
        ({"CIRRON_OUTPUT": "none"}, False),
        ({"CIRRON_API_KEY": "key", "CIRRON_API_ENDPOINT": "http://127.0.0.1:9"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, True),
    ],
)
def test_a_program_without_a_destination_loads_nothing_of_delivery(
    run_program: RunProgram,
    environment: dict[str, str],
    loads: bool,  # noqa: FBT001 - a case
) -> None:
    """No HTTP client, no protobuf, no forwarder, unless there is somewhere to send to."""
    environment = {"CIRRON_EXIT_BUDGET": "0.1", **environment}
    modules = json.loads(run_program(PROGRAM, environment, measured=False).stdout)
    assert "cirron_otel.recorder" in modules
    assert bool(_of_delivery(modules)) is loads
    assert ("urllib3" in modules) is loads
