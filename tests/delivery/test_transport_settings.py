"""From settings to destinations: which transport is chosen, and what a wrong value is told."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

import cirron_otel as ci
from cirron_otel import transport
from cirron_otel.destinations.base import DestinationSpec
from cirron_otel.destinations.event_stream import EventStream
from cirron_otel.destinations.otlp import OtlpDestination
from cirron_otel.destinations.platform import Platform
from cirron_otel.errors import ConfigurationError
from cirron_otel.settings import Settings, resolve

SECRET = "ck-live-1f9d7a"  # noqa: S105 - of no account


def _settings(environ: dict[str, str] | None = None, **given: Any) -> Settings:
    """The settings as ``profile(**given)`` finds them in this environment."""
    return resolve(call={}, constructor=given, environ=environ or {})


@pytest.mark.parametrize(
    ("environ", "word", "kinds"),
    [
        ({}, "file_only", []),
        ({"CIRRON_API_KEY": SECRET}, "http", ["platform"]),
        ({"CIRRON_RUN_ID": "r1"}, "event_stream", ["event_stream"]),
        ({"CIRRON_RUN_ID": "r1", "CIRRON_API_KEY": SECRET}, "event_stream", ["event_stream"]),
        ({"CIRRON_RUN_ID": " ", "CIRRON_API_KEY": SECRET}, "http", ["platform"]),
        ({"CIRRON_OTLP": "http://a"}, "file_only", ["otlp"]),
        ({"CIRRON_API_KEY": SECRET, "CIRRON_OTLP": "http://a,http://b"}, "http",
         ["platform", "otlp", "otlp"]),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}, "file_only", ["otlp"]),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "CIRRON_OTLP": "none"}, "file_only", []),
        ({"CIRRON_OUTPUT": "log", "CIRRON_API_KEY": SECRET}, "file_only", []),
    ],
)  # fmt: skip
def test_the_environment_chooses_the_transport(
    environ: dict[str, str], word: str, kinds: list[str]
) -> None:
    """A run id means the event stream, else a key the platform; OTLP comes beside any of them."""
    settings = _settings(environ)
    assert transport.word(settings, environ) == word
    assert [spec.kind for spec in transport.resolve(settings, environ)] == kinds


def test_a_run_id_that_is_no_runtimes_chooses_nothing() -> None:
    """``profile(run_id=)`` names a run; only the variable says that a runtime listens."""
    assert transport.resolve(resolve(call={"run_id": "mine"}, environ={}), {}) == []


def test_joined_spans_leave_otlp_to_the_application() -> None:
    """With the application's provider only receivers of our own settings get its spans."""
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}
    (beside,) = transport.resolve(_settings(environ), environ, joined=True)
    assert beside.options["traces"] is False
    assert beside.options["metrics"]["url"] == "http://a/v1/metrics"
    (spec,) = transport.resolve(_settings(environ, otlp="http://b"), environ, joined=True)
    assert spec.description == "OTLP http/protobuf to http://b/v1/traces"


def test_each_kind_is_made_from_its_description(tmp_path: Path) -> None:
    """A description survives JSON, and makes the destination it names in whichever process."""
    environ = {"CIRRON_API_KEY": SECRET, "CIRRON_INGEST_PATH": "/api/traces"}
    settings = _settings(environ, output_dir=tmp_path, otlp={"http://c": {"timeout": 3}})
    specs = transport.resolve(settings, environ)
    specs += transport.resolve(_settings(), {"CIRRON_RUN_ID": "r"})
    again = msgspec.json.decode(msgspec.json.encode(specs), type=list[DestinationSpec])
    made = [transport.connect(spec) for spec in again]
    assert [type(one) for one in made] == [Platform, OtlpDestination, EventStream]
    assert [one.name for one in made] == [spec.name for spec in specs]
    assert [one.description for one in made] == [spec.description for spec in specs]
    assert made[0].description == "platform https://api.cirron.com/api/traces"
    for one in made:
        one.close()


def test_a_project_file_with_nothing_but_a_profiling_section_counts(tmp_path: Path) -> None:
    """Key, path and receivers may stand in cirron.yaml, whatever else the file lacks."""
    (tmp_path / "cirron.yaml").write_text(
        f"""
profiling:
  api_key: {SECRET}
  ingest_path: /api/traces
  exit_budget: 1.5
  forward: process
  otlp:
    http://a:4318:
      timeout: 2
    https://b:
""",
        encoding="utf-8",
    )
    settings = resolve(call={}, environ={}, cwd=tmp_path, home=tmp_path)
    assert (settings.forward, settings.exit_budget) == ("process", 1.5)
    assert [spec.description for spec in transport.resolve(settings, {})] == [
        "platform https://api.cirron.com/api/traces",
        "OTLP http/protobuf to http://a:4318/v1/traces",
        "OTLP http/protobuf to https://b/v1/traces",
    ]
    assert settings.source("otlp") == str(tmp_path / "cirron.yaml")


def test_no_description_shows_a_secret() -> None:
    """Neither a spec nor a destination nor the settings show key, headers or a URL's login."""
    environ = {"CIRRON_API_KEY": SECRET, "CIRRON_HEADERS": f"x-key={SECRET}"}
    settings = _settings(
        environ,
        otlp=[f"https://me:{SECRET}@a.example", {"endpoint": "http://b", "headers": {"k": SECRET}}],
    )
    specs = transport.resolve(settings, environ)
    assert len(specs) == 3
    shown = repr(specs) + repr(settings) + str(settings.describe()) + str(settings.to_carrier())
    assert SECRET not in shown
    assert "a.example" in shown
    assert "otlp" not in settings.to_carrier()["settings"]  # type: ignore[operator]


def test_without_a_spool_nothing_is_sent_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An output without spool and a key contradict one another."""
    with caplog.at_level(logging.WARNING):
        assert transport.resolve(_settings(output="log", api_key=SECRET), {}) == []
    assert "output (from Cirron()) has no 'spool', so nothing is sent" in caplog.text


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("otlp", "collector:4317", "collector:4317"),
        ("otlp", 5, "5"),
        ("otlp", [], "it is empty"),
        ("otlp", {"http://a": 3}, "int stands where options"),
        ("otlp", {"http://a": {"protocol": "carrier-pigeon"}}, "carrier-pigeon"),
        ("otlp", {"http://a": {"colour": "red"}}, "colour"),
        ("otlp", "http://a:99999", "http://a:99999"),
        ("headers", "no equals sign", "no '='"),
        ("headers", {"bad name": "x"}, "no header's name"),
        ("headers", {"name": "line\nbreak"}, "printable ASCII"),
        ("headers", {"name": 3}, "printable ASCII"),
        ("forward", "sometimes", "'sometimes'"),
        ("exit_budget", -1, "-1"),
        ("exit_budget", "soon", "'soon'"),
        ("exit_budget", float("inf"), "inf"),
        ("ranks", "odd", "'odd'"),
        ("export_rate", "-0.1", "'-0.1'"),
        ("export_burst", 1.5, "1.5"),
    ],
)
def test_a_wrong_value_is_told_by_profile(name: str, value: Any, says: str) -> None:
    """The error names setting, value and source, and nothing has begun."""
    with pytest.raises(ConfigurationError) as caught:
        ci.profile(frameworks=[], **{name: value})
    text = str(caught.value)
    assert name in text
    assert says in text
    assert "argument" in text or "profile(" in text
    assert not ci.health()["enabled"]
    assert not Path(".cirron").exists()


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("CIRRON_FORWARD", "maybe", "forward = 'maybe' (from CIRRON_FORWARD)"),
        ("CIRRON_OTLP", "http://a:99999", "(from CIRRON_OTLP)"),
        ("http_proxy", "gopher://x", "HTTP_PROXY"),
        ("CIRRON_API_ENDPOINT", "platform", "api_endpoint = 'platform' (from CIRRON_API_ENDPOINT)"),
    ],
)
def test_a_wrong_variable_is_told_by_profile(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str
) -> None:
    """What the environment has wrong is named by its variable."""
    monkeypatch.setenv("CIRRON_API_KEY", SECRET)
    monkeypatch.setenv("CIRRON_API_ENDPOINT", "http://platform.invalid")
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError) as caught:
        ci.profile(frameworks=[])
    assert says in str(caught.value)
    assert not Path(".cirron").exists()
