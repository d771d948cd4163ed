"""The collector configurations we ship hold together: every name in them leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

CONFIGS = Path(__file__).resolve().parents[2] / "collector-config"

#: Names of components as collector 0.144 and later know them, by where they may stand.
KNOWN = {
    "receivers": {"otlp"},
    "processors": {"memory_limiter"},
    "exporters": {"otlp_grpc", "otlp_http", "debug"},
    "connectors": {"routing", "spanmetrics", "signal_to_metrics"},
    "extensions": {"health_check", "file_storage"},
}


def load(name: str) -> dict[str, Any]:
    """A configuration as the collector would read it."""
    found: dict[str, Any] = yaml.safe_load((CONFIGS / name).read_text(encoding="utf-8"))
    return found


def values(thing: Any, key: str) -> list[Any]:
    """Everything that stands under this key, however deep."""
    if isinstance(thing, dict):
        here = [thing[key]] if key in thing else []
        return here + [found for value in thing.values() for found in values(value, key)]
    if isinstance(thing, list):
        return [found for value in thing for found in values(value, key)]
    return []


@pytest.mark.parametrize("name", ["minimal.yaml", "agent.yaml"])
def test_every_reference_is_resolved(name: str) -> None:
    """Pipelines, extensions and storages name what is defined, and all that is defined is used."""
    config = load(name)
    assert set(config) <= {*KNOWN, "service"}
    used: dict[str, set[str]] = {kind: set() for kind in KNOWN}
    used["extensions"].update(config["service"].get("extensions", []))
    for signal, pipeline in config["service"]["pipelines"].items():
        assert signal.partition("/")[0] in {"traces", "metrics", "logs"}
        assert set(pipeline) == {"receivers", "processors", "exporters"}
        for kind, names in pipeline.items():
            used[kind].update(names)
        assert pipeline["processors"][0] == "memory_limiter"
    for storage in values(config["exporters"], "storage"):
        assert storage in used["extensions"]
    for kind, known in KNOWN.items():
        defined = set(config.get(kind, {}))
        assert used[kind] == defined
        assert {one.partition("/")[0] for one in defined} <= known


@pytest.mark.parametrize("name", ["minimal.yaml", "agent.yaml"])
def test_the_promises_of_the_comments(name: str) -> None:
    """Retries never end, batches are counted in bytes below 4 MiB, nothing listens outside."""
    config = load(name)
    for exporter in config["exporters"].values():
        assert exporter["retry_on_failure"]["max_elapsed_time"] == 0
        queue = exporter["sending_queue"]
        assert queue["sizer"] == queue["batch"]["sizer"] == "bytes"
        assert queue["batch"]["min_size"] < queue["batch"]["max_size"] < 4 * 1024 * 1024
        assert queue["queue_size"] > queue["batch"]["max_size"]
        if name == "agent.yaml":
            assert queue["storage"] == "file_storage/queue"
    for protocol in config["receivers"]["otlp"]["protocols"].values():
        assert re.fullmatch(r"localhost:\d+", protocol["endpoint"])
    text = (CONFIGS / name).read_text(encoding="utf-8")
    variables = set(re.findall(r"\$\{env:(\w+)\}", text))
    assert variables
    assert all(f"{one}=" in text for one in variables)
