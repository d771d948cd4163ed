"""Where every setting comes from, which source wins, and what a wrong value is told."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cirron_otel import setting_rules
from cirron_otel.errors import CirronDependencyError, ConfigurationError
from cirron_otel.settings import NOT_GIVEN, Settings, resolve
from cirron_otel.yaml_file import find_project_file

KEY = "ck-live-1f9d7a"


class Case(NamedTuple):
    """A setting, six texts for it that differ, and the values they stand for."""

    name: str
    texts: tuple[str, ...]
    values: tuple[object, ...]


def _words(name: str) -> Case:
    words = tuple(f"{name}-{letter}" for letter in "abcdef")
    return Case(name, words, words)


def _numbers(name: str) -> Case:
    return Case(name, ("10", "11", "12", "13", "14", "15"), (10, 11, 12, 13, 14, 15))


def _booleans(name: str) -> Case:
    return Case(
        name, ("TRUE", "no", "on", "0", "Yes", "off"), (True, False, True, False, True, False)
    )


CASES = [
    _booleans("signals"),
    _booleans("set_global"),
    Case(
        "frameworks",
        ("torch", "keras", "torch,transformers", "pytorch", "none", "auto"),
        (("torch",), ("tensorflow",), ("transformers", "torch"), ("torch",), (), None),
    ),
    Case(
        "snapshots",
        ("full", "Sampled", "off", "stats", "none", "full"),
        ("full", "sampled", None, "stats", None, "full"),
    ),
    Case(
        "watchdog",
        ("true", "60", "off", "1.5", "0", "7"),
        (True, 60.0, False, 1.5, False, 7.0),
    ),
    Case(
        "terminal",
        ("none", "Summary", "progress", "auto", "none", "summary"),
        ("none", "summary", "progress", "auto", "none", "summary"),
    ),
    Case("snapshot_every", ("1", "2", "3", "4", "5", "0"), (1, 2, 3, 4, 5, 0)),
    Case(
        "snapshot_max_bytes",
        ("1e9", "2000", "3000", "4000", "5000", "6000"),
        (1_000_000_000, 2000, 3000, 4000, 5000, 6000),
    ),
    Case(
        "sample_rate",
        ("0", "1", "0.5", "1e-3", ".25", "1.0"),
        (0.0, 1.0, 0.5, 0.001, 0.25, 1.0),
    ),
    Case(
        "flush_interval",
        ("0.1", "2", "3.5", "4", "5e-1", "6"),
        (0.1, 2.0, 3.5, 4.0, 0.5, 6.0),
    ),
    Case(
        "spool_max_bytes",
        ("1", "1e9", "2_000", "40", "50", "60"),
        (1, 10**9, 2000, 40, 50, 60),
    ),
    _words("api_key"),
    Case(
        "api_endpoint",
        (
            "http://a",
            "https://b/",
            "http://c:1",
            "http://d/p/",
            "http://e/v1/traces",
            "http://[::1]",
        ),
        ("http://a", "https://b", "http://c:1", "http://d/p", "http://e", "http://[::1]"),
    ),
    Case(
        "ingest_path",
        ("/a", "/b", "/c/d", "/e", "/f", "/g"),
        ("/a", "/b", "/c/d", "/e", "/f", "/g"),
    ),
    _words("workspace_id"),
    _words("run_id"),
    _words("pipeline_id"),
    _words("deployment_id"),
    _words("model_id"),
    Case(
        "output",
        ("log", "stdout,spool", "none", "spool", "Log,none", "stdout"),
        (("log",), ("spool", "stdout"), (), ("spool",), (), ("stdout",)),
    ),
    _numbers("trace_buffer_max_spans"),
    _numbers("trace_max_spans"),
    Case(
        "resources",
        ("cpu", "memory", "memory, cpu", "none", "CPU", "cpu,cpu"),
        (("cpu",), ("memory",), ("cpu", "memory"), (), ("cpu",), ("cpu",)),
    ),
    Case(
        "spans",
        ("all", "own", "ALL", "own", "all", "own"),
        ("all", "own", "all", "own", "all", "own"),
    ),
    _numbers("start_iteration"),
    Case(
        "otlp",
        ("http://a:4318", "https://b/v1/traces", "http://c, http://d", "none", "OFF", "http://e/"),
        (
            ({"endpoint": "http://a:4318"},),
            ({"endpoint": "https://b/v1/traces"},),
            ({"endpoint": "http://c"}, {"endpoint": "http://d"}),
            (),
            (),
            ({"endpoint": "http://e/"},),
        ),
    ),
    Case(
        "headers",
        ("a=1", "b=2, c=3", "d=x%20y", "e=", "f=a=b", "G=1"),
        ({"a": "1"}, {"b": "2", "c": "3"}, {"d": "x y"}, {"e": ""}, {"f": "a=b"}, {"G": "1"}),
    ),
    Case(
        "forward",
        ("thread", "process", "OFF", "off", "Thread", "process"),
        ("thread", "process", "off", "off", "thread", "process"),
    ),
    Case("heartbeat", ("0", "1", "2.5", "30", "1e1", ".5"), (0.0, 1.0, 2.5, 30.0, 10.0, 0.5)),
    Case("exit_budget", ("0", "1", "2.5", "30", "1e1", ".5"), (0.0, 1.0, 2.5, 30.0, 10.0, 0.5)),
    Case(
        "ranks",
        ("all", "rank0", "first_per_node", "sampled", "RANK0", "all"),
        ("all", "rank0", "first_per_node", "sampled", "rank0", "all"),
    ),
    Case("export_rate", ("0", "1", "2.5", "30", "1e1", ".5"), (0.0, 1.0, 2.5, 30.0, 10.0, 0.5)),
    _numbers("export_burst"),
    Case(
        "request_sample_ratio",
        ("0.1", "0.2", "0.3", "0.4", "0.5", "1"),
        (0.1, 0.2, 0.3, 0.4, 0.5, 1.0),
    ),
    _numbers("tenant_rate"),
    _booleans("monitor"),
    Case(
        "stop_on",
        ("critical", "warning,critical", "none", "Loss_Spike", "info", "a, b"),
        (
            ("critical",), ("warning", "critical"), (), ("loss_spike",), ("info",), ("a", "b"),
        ),
    ),
    Case(
        "webhook",
        ("http://a", "https://b/x", "http://c:1/y", "https://d/?k=1", "https://e/f", "http://[::1]/"),
        ("http://a", "https://b/x", "http://c:1/y", "https://d/?k=1", "https://e/f", "http://[::1]/"),
    ),
    Case(
        "profile_on",
        ("critical", "warning,critical", "none", "Straggler", "info", "a, b"),
        (
            ("critical",), ("warning", "critical"), (), ("straggler",), ("info",), ("a", "b"),
        ),
    ),
    Case(
        "flops_per_token",
        ("6e9", "none", "1", "2.5e12", ".5", "7"),
        (6e9, None, 1.0, 2.5e12, 0.5, 7.0),
    ),
    Case(
        "device_peak_flops",
        ("9.89e14", "none", "1", "2.5e12", ".5", "7"),
        (9.89e14, None, 1.0, 2.5e12, 0.5, 7.0),
    ),
    Case(
        "tee",
        ("wandb", "mlflow, wandb", "none", "TensorBoardX", "accelerate", "tensorboard,mlflow"),
        (
            ("wandb",), ("wandb", "mlflow"), (), ("tensorboard",), ("accelerate",),
            ("tensorboard", "mlflow"),
        ),
    ),
    Case(
        "mirror",
        ("nvtx", "record_function", "off", "NVTX", "none", "Record_Function"),
        ("nvtx", "record_function", None, "nvtx", None, "record_function"),
    ),
]  # fmt: skip

SOURCES = ("toml", "environment", "constructor", "project", "config", "call")


class Place:
    """An empty home and working directory, and what is written there."""

    def __init__(self, root: Path) -> None:
        """Make both directories under ``root``."""
        self.home = root / "home"
        self.cwd = root / "work" / "deep"
        self.toml = self.home / ".cirron" / "config.toml"
        self.project = root / "work" / "cirron.json"
        self.toml.parent.mkdir(parents=True)
        self.cwd.mkdir(parents=True)

    def resolve(self, environ: Mapping[str, str] | None = None, **given: object) -> Settings:
        """Resolve here, with nothing of the machine's own."""
        call = {"call": {}, **given}
        return resolve(environ=environ or {}, cwd=self.cwd, home=self.home, **call)  # type: ignore[arg-type]

    def from_sources(self, name: str, texts: Mapping[str, str]) -> Settings:
        """Resolve with one setting given by the sources that ``texts`` names."""
        if "toml" in texts:
            self.toml.write_text(f"[default]\n{name} = {json.dumps(texts['toml'])}\n")
        if "project" in texts:
            self.project.write_text(json.dumps({"profiling": {name: texts["project"]}}))
        environ = {f"CIRRON_{name.upper()}": texts["environment"]} if "environment" in texts else {}
        return self.resolve(
            environ,
            constructor={name: texts["constructor"]} if "constructor" in texts else {},
            config={name: texts["config"]} if "config" in texts else None,
            call={name: texts["call"]} if "call" in texts else {},
        )

    def label(self, source: str, name: str) -> str:
        """What ``sources`` must say."""
        return {
            "toml": str(self.toml),
            "environment": f"CIRRON_{name.upper()}",
            "constructor": "Cirron()",
            "project": str(self.project),
            "config": "config=",
            "call": "argument",
        }[source]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A fresh home and working directory."""
    return Place(tmp_path)


def test_every_setting_is_in_the_tests() -> None:
    """A new setting cannot come without its tests of precedence."""
    elsewhere = {"enabled", "output_dir", "rank", "world_size", "local_rank"}
    assert {case.name for case in CASES} | elsewhere == setting_rules.RULES.keys()
    assert set(Settings.__struct_fields__) == setting_rules.RULES.keys() | {"extras", "sources"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_source_gives_the_setting_and_overrules_the_weaker_ones(
    case: Case, place: Place
) -> None:
    """Every source alone is heard, and with all weaker ones beside it wins."""
    texts = dict(zip(SOURCES, case.texts, strict=True))
    for rank, (source, value) in enumerate(zip(SOURCES, case.values, strict=True)):
        for given_by in ({source}, set(SOURCES[: rank + 1])):
            place.toml.unlink(missing_ok=True)
            place.project.unlink(missing_ok=True)
            settings = place.from_sources(case.name, {s: texts[s] for s in given_by})
            assert getattr(settings, case.name) == value, given_by
            assert settings.source(case.name) == place.label(source, case.name)
            assert set(settings.sources) == {case.name}


def test_defaults(place: Place) -> None:
    """With nothing given, the defaults are those that are documented."""
    settings = place.resolve()
    assert settings == Settings(output_dir=place.cwd / ".cirron")
    assert Settings().output_dir == Path("./.cirron")
    assert (settings.snapshots, settings.sample_rate, settings.flush_interval) == ("stats", 0.01, 1)
    assert (settings.spool_max_bytes, settings.ingest_path) == (1_000_000_000, "/v1/traces")
    assert settings.frameworks is None
    assert settings.output == ("spool",)
    assert {source for _, _, source in settings.describe()} == {"default"}


def test_path_is_the_output_directory(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """profile(path=) overrules every other source, relative to the working directory."""
    environ = {"CIRRON_OUTPUT_DIR": "/from/env"}
    assert place.resolve(environ).output_dir == Path("/from/env")
    settings = place.resolve(environ, call={"path": "runs"})
    assert settings.output_dir == place.cwd / "runs"
    assert settings.source("output_dir") == "argument"
    monkeypatch.setenv("HOME", str(place.home))
    assert place.resolve(call={"path": Path("~/runs")}).output_dir == place.home / "runs"
    with pytest.raises(ConfigurationError, match="path and output_dir are one setting"):
        place.resolve(call={"path": "a", "output_dir": "b"})
    with pytest.raises(ConfigurationError, match=r"a settings file goes into config_path="):
        place.resolve(call={"path": "cirron.yaml"})


def test_what_counts_as_not_given(place: Place) -> None:
    """NOT_GIVEN and None leave the weaker source alone; None for snapshots means off."""
    environ = {"CIRRON_SNAPSHOTS": "full", "CIRRON_SAMPLE_RATE": "0.5", "CIRRON_RUN_ID": "  "}
    settings = place.resolve(environ, call={"snapshots": NOT_GIVEN, "sample_rate": None})
    assert (settings.snapshots, settings.sample_rate, settings.run_id) == ("full", 0.5, None)
    assert place.resolve(environ, call={"snapshots": None}).snapshots is None
    assert place.resolve(environ, constructor={"snapshots": None}).snapshots is None
    assert place.resolve(environ, config={"snapshots": None, "sample_rate": None}) == (
        place.resolve(environ, config={"snapshots": False})
    )
    assert repr(NOT_GIVEN) == "NOT_GIVEN"


@pytest.mark.parametrize("text", ["false", "FALSE", "0", "no", "Off"])
def test_the_environment_switches_everything_off(text: str, place: Place) -> None:
    """CIRRON_ENABLED=false wins over every argument, and nothing else is even read."""
    place.project.write_text("this is no JSON")
    settings = place.resolve(
        {"CIRRON_ENABLED": text, "CIRRON_SAMPLE_RATE": "seven"}, call={"enabled": True}
    )
    assert not settings.enabled
    assert settings.source("enabled") == "CIRRON_ENABLED"


def test_enabled_from_the_other_sources(place: Place) -> None:
    """An argument overrules the files, and a file can turn the profiler off."""
    environ = {"CIRRON_ENABLED": "true"}
    place.project.write_text('{"profiling": {"enabled": false}}')
    assert not place.resolve(environ).enabled
    assert place.resolve(environ, call={"enabled": True}).enabled
    place.project.write_text("this is no JSON")
    assert place.resolve(environ, call={"enabled": False}).source("enabled") == "argument"


WRONG: list[tuple[str, object, str]] = [
    ("enabled", "maybe", "true or false (1 or 0, yes or no, on or off)"),
    ("signals", 2, "true or false (1 or 0, yes or no, on or off)"),
    ("set_global", 1.0, "true or false (1 or 0, yes or no, on or off)"),
    ("output_dir", "", "it is empty; it must be the path of a directory"),
    ("output_dir", "a\0b", "it has a NUL character; it must be the path of a directory"),
    ("output_dir", b"runs", "it must be the path of a directory"),
    ("frameworks", "torch,jax", "'jax' is not known; it must be names out of transformers,"),
    ("frameworks", ["torch", 3], "int is not a name; it must be names out of"),
    ("frameworks", "none,torch", "'none' stands beside other names"),
    ("frameworks", ",", "it is empty"),
    ("frameworks", 7, "it must be names out of transformers, lightning, tensorflow (or keras)"),
    ("snapshots", "zzz", "it must be stats, sampled, full or off"),
    ("snapshots", True, "it must be stats, sampled, full or off"),
    ("sample_rate", "a lot", "it must be a number from 0 to 1"),
    ("sample_rate", 1.01, "it must be a number from 0 to 1"),
    ("sample_rate", True, "it must be a number from 0 to 1"),
    ("sample_rate", float("nan"), "it must be a number from 0 to 1"),
    ("flush_interval", 0, "it must be a number of seconds above 0"),
    ("flush_interval", "-1", "it must be a number of seconds above 0"),
    ("flush_interval", float("inf"), "it must be a number of seconds above 0"),
    ("flush_interval", [1], "it must be a number of seconds above 0"),
    ("spool_max_bytes", 0, "it must be a number of bytes: a whole number, 1 or more"),
    ("spool_max_bytes", "1.5", "it must be a number of bytes: a whole number, 1 or more"),
    ("spool_max_bytes", "1GB", "it must be a number of bytes: a whole number, 1 or more"),
    ("spool_max_bytes", float("inf"), "it must be a number of bytes"),
    ("spool_max_bytes", 2**63, "it must be a number of bytes"),
    ("api_endpoint", "api.cirron.com", "it must be a URL such as https://api.cirron.com"),
    ("api_endpoint", "https://h:99999", "it must be a URL such as https://api.cirron.com"),
    ("ingest_path", "v1/traces", "it must be the path of a URL such as /v1/traces"),
    ("workspace_id", 42, "it is of type int, and text has to be quoted"),
    ("run_id", "a\nb", "it has characters that cannot be printed"),
    ("run_id", "\ud800", "it has characters that cannot be printed"),
    ("pipeline_id", " ", "it is empty; it must be a text of printable characters"),
    ("deployment_id", 1.5, "it is of type float"),
    ("model_id", [], "it is of type list"),
    ("output", {"spool": 1}, "it must be spool, log, stdout or none, or several"),
    ("output", "file", "'file' is not known; it must be spool, log, stdout or none, or several"),
    ("trace_buffer_max_spans", -1, "it must be a whole number, 0 or more"),
    ("trace_max_spans", 9, "it must be a whole number, 10 or more"),
    ("resources", ["gpu"], "'gpu' is not known; it must be names out of cpu, memory; or none"),
    ("spans", "some", "it must be own or all"),
    ("start_iteration", -1, "it must be a whole number, 0 or more"),
    ("rank", "two", "it must be a whole number, 0 or more"),
    ("world_size", 0, "it must be a whole number, 1 or more"),
    ("local_rank", -1, "it must be a whole number, 0 or more"),
]


@pytest.mark.parametrize(("name", "value", "right"), WRONG)
def test_a_wrong_value_is_named_with_its_source_and_what_would_be_right(
    name: str, value: object, right: str, place: Place
) -> None:
    """The message has the setting, the value, where it came from and what would be right."""
    with pytest.raises(ConfigurationError) as caught:
        place.resolve(call={name: value})
    assert str(caught.value).startswith(f"{name} = {value!r} (from argument) cannot be used: ")
    assert right in str(caught.value)


@pytest.mark.parametrize("source", SOURCES)
def test_a_wrong_value_is_refused_from_every_source(source: str, place: Place) -> None:
    """No source may drop a bad value silently, not even one that is overruled."""
    texts = dict.fromkeys(SOURCES, "0.5") | {source: "much"}
    with pytest.raises(ConfigurationError) as caught:
        place.from_sources("sample_rate", texts)
    where = place.label(source, "sample_rate")
    assert f"sample_rate = 'much' (from {where}) cannot be used" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("api_key", f"{KEY} and more"),
        ("api_key", f"{KEY}\nX-Other: 1"),
        ("api_key", KEY.encode()),
        ("api_endpoint", f"https://user:{KEY}@host"),
        ("api_endpoint", f"https://host/?token={KEY}"),
        ("api_endpoint", f"https://host/#{KEY}"),
    ],
)
def test_messages_mask_secrets(name: str, value: object, place: Place) -> None:
    """A wrong key is not repeated by the message that refuses it, nor by its causes."""
    with pytest.raises(ConfigurationError) as caught:
        place.resolve(call={name: value})
    assert setting_rules.MASK in str(caught.value)
    assert KEY not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_numbers_of_other_libraries(place: Place) -> None:
    """Scalars of numpy and torch are the numbers that they hold; wrong ones are refused."""
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    settings = place.resolve(
        call={"sample_rate": torch.tensor(0.25), "trace_max_spans": numpy.int64(50)}
    )
    assert (settings.sample_rate, settings.trace_max_spans) == (0.25, 50)
    assert (type(settings.sample_rate), type(settings.trace_max_spans)) == (float, int)
    assert place.resolve(call={"sample_rate": numpy.float32(0.5)}).sample_rate == 0.5
    with pytest.raises(ConfigurationError, match="it must be a number from 0 to 1"):
        place.resolve(call={"sample_rate": torch.zeros(2)})


def test_shown_settings_mask_secrets(place: Place) -> None:
    """The key can be used, and stands in no text and in no carrier."""
    extras = {"sender": {"headers": {"x-api-key": KEY}, "accessToken": KEY, "max_tokens": 5}}
    settings = place.resolve({"CIRRON_API_KEY": f"{KEY}\n"}, config=extras)
    assert settings.api_key == KEY
    texts = [repr(settings), repr(settings.__rich_repr__()), repr(settings.describe())]
    assert all(KEY not in text and setting_rules.MASK in text for text in texts)
    assert all("'max_tokens': 5" in text for text in texts)
    assert ("api_key", "***", "CIRRON_API_KEY") in settings.describe()
    carrier = settings.to_carrier()
    assert KEY not in json.dumps(carrier)
    assert carrier["extras"] == {"sender": {"max_tokens": 5}}
    assert Settings.from_carrier(carrier, {}).api_key is None


def test_describe_says_what_people_need(place: Place) -> None:
    """Values that are None or a list read as words."""
    rows = place.resolve({"CIRRON_OUTPUT": "none"}, call={"snapshots": None}).describe()
    assert [name for name, _, _ in rows] == [*setting_rules.RULES, "extras"]
    assert ("snapshots", "off", "argument") in rows
    assert ("output", "none", "CIRRON_OUTPUT") in rows
    assert ("frameworks", "auto", "default") in rows
    assert ("run_id", "not set", "default") in rows
    assert ("signals", "true", "default") in rows


def test_unknown_arguments_are_refused(place: Place) -> None:
    """A setting that does not exist is an error in a call, with the nearest name."""
    with pytest.raises(ConfigurationError, match=r"profile\(\) has no setting 'sample_rates'; did"):
        place.resolve(call={"sample_rates": 1})
    with pytest.raises(ConfigurationError, match=r"Cirron\(\) has no setting 'xyzzy'$"):
        place.resolve(constructor={"xyzzy": 1})


def test_extras_are_kept_and_merged(place: Place) -> None:
    """Keys that are no settings stay, those of config= over those of the file, key by key."""
    place.project.write_text(
        json.dumps({"profiling": {"torch": {"epoch_steps": 500, "a": 1}, "beta": True}})
    )
    settings = place.resolve(config={"torch": {"a": 2}, "beta": None})
    assert settings.extras == {"torch": {"epoch_steps": 500, "a": 2}, "beta": None}
    assert settings.source("extras") == f"config=, {place.project}"
    assert place.resolve().extras == {"torch": {"epoch_steps": 500, "a": 1}, "beta": True}


def test_misspelt_keys_are_warned_of(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """A key close to a setting's name is kept and warned of; others pass without a word."""
    place.toml.write_text("[default]\nload_max_bytes = 5\nworkspace = 'w'\n")
    environ = {"CIRRON_SAMPLE_RATES": "1", "CIRRON_LOAD_MAX_BYTES": "5", "CIRRON_SECRET_A": "b"}
    settings = place.resolve(environ, config={"flush-interval": 2, "torch": {}, "mine": 1})
    assert settings.extras == {"flush-interval": 2, "torch": {}, "mine": 1}
    assert [record.getMessage() for record in caplog.records] == [
        f"workspace in {place.toml} is not a setting; did you mean workspace_id?",
        "CIRRON_SAMPLE_RATES in the environment is not a setting; did you mean CIRRON_SAMPLE_RATE?",
        "flush-interval in config= is not a setting; did you mean flush_interval?",
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_a_very_long_interval_is_warned_of(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """A thousand seconds are more likely meant as milliseconds."""
    assert place.resolve({"CIRRON_FLUSH_INTERVAL": "1000"}).flush_interval == 1000
    assert "flush_interval is 1000 seconds (from CIRRON_FLUSH_INTERVAL)" in caplog.text


@pytest.mark.parametrize(
    ("environ", "numbers", "source"),
    [
        ({}, (0, 1, 0), "default"),
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}, (3, 4, 1), "RANK"),
        ({"RANK": "", "LOCAL_RANK": "1", "SLURM_PROCID": "9"}, (1, 1, 1), "LOCAL_RANK"),
        (
            {"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "5"},
            (9, 16, 5),
            "SLURM_PROCID",
        ),
    ],
)
def test_launchers_numbers(
    environ: dict[str, str], numbers: tuple[int, int, int], source: str, place: Place
) -> None:
    """Rank, world size and local rank come from torchrun's variables, else from Slurm's."""
    settings = place.resolve(environ)
    assert (settings.rank, settings.world_size, settings.local_rank) == numbers
    assert settings.source("rank") == source
    assert place.resolve(environ, call={"rank": 7}).rank == 7


@pytest.mark.parametrize("text", ["two", "-1", "1.5"])
def test_a_launcher_variable_that_is_no_rank(
    text: str, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """A RANK that is no rank is 0, with a warning that names it, and no error."""
    assert place.resolve({"RANK": text, "LOCAL_RANK": "3"}).rank == 0
    assert f"rank = {text!r} (from RANK) cannot be used" in caplog.text


@pytest.mark.parametrize("source", ["toml", "project", "config"])
def test_no_file_sets_the_rank(source: str, place: Place) -> None:
    """One rank for all processes of a run would mix their rows."""
    with pytest.raises(ConfigurationError, match="differs between the processes of a run"):
        place.from_sources("rank", {source: "3"})


# -- the files -------------------------------------------------------------------------------


def test_project_file_search(place: Place) -> None:
    """The nearest directory wins, and in it yaml before yml before json."""
    root = place.project.parent
    assert find_project_file(place.cwd) is None
    place.project.write_text("{}")
    assert find_project_file(place.cwd) == place.project
    (root / "cirron.yml").write_text("")
    assert find_project_file(place.cwd) == root / "cirron.yml"
    (root / "cirron.yaml").write_text("")
    assert find_project_file(place.cwd) == root / "cirron.yaml"
    (place.cwd / "cirron.yaml").mkdir()
    (place.cwd / "cirron.json").write_text("{}")
    assert find_project_file(place.cwd) == place.cwd / "cirron.json"


def test_config_path_replaces_the_search(place: Place) -> None:
    """A named file is read instead of the one found; one that is missing is an error."""
    place.project.write_text('{"profiling": {"sample_rate": 0.1}}')
    other = place.cwd / "other.json"
    other.write_text('\ufeff{"name": "x", "profiling": {"sample_rate": 0.2}}')
    settings = place.resolve(config_path="other.json")
    assert (settings.sample_rate, settings.source("sample_rate")) == (0.2, str(other))
    with pytest.raises(ConfigurationError, match=r"none\.json cannot be read: No such file"):
        place.resolve(config_path=place.cwd / "none.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON: "),
        ("[1]", "the file must hold keys and values, not list"),
        ('{"profiling": 3}', "'profiling' must hold keys and values, not int"),
        ("\ud800", "is not valid JSON: "),
    ],
)
def test_broken_project_files(text: str, message: str, place: Place) -> None:
    """A file that is found and cannot be used is an error that names it."""
    place.project.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigurationError) as caught:
        place.resolve()
    assert str(place.project) in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "{}", "null", '{"name": "x"}', '{"profiling": null}'])
def test_project_files_without_settings(text: str, place: Place) -> None:
    """A project file need not have anything for us."""
    place.project.write_text(text)
    assert place.resolve() == Settings(output_dir=place.cwd / ".cirron")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"[default]\napi_key = {KEY}", "is not valid TOML: "),
        ("default = 3", "[default] must hold keys and values, not int"),
        ("[default]\nsample_rate = true", "sample_rate = True (from "),
        ("\udcff", "is not valid TOML: "),
    ],
)
def test_broken_user_files(text: str, message: str, place: Place) -> None:
    """A config.toml that cannot be used is an error that names it and repeats no secret."""
    place.toml.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigurationError) as caught:
        place.resolve()
    assert str(place.toml) in str(caught.value)
    assert message in str(caught.value)
    assert KEY not in str(caught.value)


def test_config_must_be_a_dict(place: Place) -> None:
    """A file name given as config= is told where it belongs."""
    with pytest.raises(ConfigurationError, match="not str; a file goes into config_path="):
        place.resolve(config="cirron.yaml")


def test_yaml_without_pyyaml(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A yaml file that cannot be read for want of PyYAML says what to install."""
    (place.cwd / "cirron.yaml").write_text("profiling: {sample_rate: 0.5}\n")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(CirronDependencyError) as caught:
        place.resolve()
    assert "pip install 'cirron-otel[yaml]'" in str(caught.value)
    assert str(place.cwd / "cirron.yaml") in str(caught.value)


def test_yaml(place: Place) -> None:
    """What YAML makes of off, null and 1e-3 is understood, and only profiling: counts."""
    pytest.importorskip("yaml")
    path = place.cwd / "cirron.yaml"
    path.write_text(
        "name: x\nprofiling:\n  snapshots: off\n  sample_rate: 1e-3\n  frameworks: [pytorch]\n"
        "  run_id: null\n  torch: {epoch_steps: 500}\n"
    )
    settings = place.resolve()
    assert (settings.snapshots, settings.sample_rate) == (None, 0.001)
    assert (settings.frameworks, settings.run_id) == (("torch",), None)
    assert settings.extras == {"torch": {"epoch_steps": 500}}
    assert settings.source("snapshots") == str(path)
    path.write_text("profiling:\n  snapshots:\n")
    assert place.resolve().snapshots is None
    path.write_text("profiling:\n  run_id: 0123\n")
    with pytest.raises(ConfigurationError, match="text has to be quoted"):
        place.resolve()


@pytest.mark.parametrize("text", [f"profiling: [{KEY}", f"a: {KEY}: b", "a: 2024-13-45", "\x01"])
def test_broken_yaml(text: str, place: Place) -> None:
    """YAML that does not parse names the file, and does not quote it."""
    pytest.importorskip("yaml")
    (place.cwd / "cirron.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=r"cirron\.yaml is not valid YAML: ") as caught:
        place.resolve()
    assert KEY not in str(caught.value)


# -- the carrier -----------------------------------------------------------------------------

_IDS = st.text(st.characters(codec="utf-8"), min_size=1).filter(
    lambda text: text.isprintable() and text == text.strip()
)
_LEAVES = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(0, 1) | st.text(max_size=5)
_LISTS = st.lists(_LEAVES, max_size=3)
_EXTRAS = st.dictionaries(
    st.sampled_from(["torch", "mine", "a b"]),
    _LEAVES | _LISTS | st.dictionaries(st.text("xyz"), _LEAVES | _LISTS, max_size=3),
    max_size=3,
)


@st.composite
def _given_settings(draw: st.DrawFn) -> dict[str, object]:
    return draw(
        st.fixed_dictionaries(
            {},
            optional={
                "output_dir": st.text("abc/ é", min_size=1).map(lambda text: f"d{text}"),
                "frameworks": st.lists(st.sampled_from(["torch", "keras", "transformers"])),
                "snapshots": st.sampled_from(["stats", "sampled", "full", None]),
                "sample_rate": st.floats(0, 1),
                "flush_interval": st.floats(0.001, 100),
                "spool_max_bytes": st.integers(1, 2**63 - 1),
                "api_endpoint": st.sampled_from(["http://h", "https://h:4/v1/traces/v1/traces"]),
                "run_id": _IDS,
                "model_id": _IDS,
                "output": st.lists(st.sampled_from(["spool", "log", "stdout", "none"])),
                "resources": st.lists(st.sampled_from(["cpu", "memory"])),
                "signals": st.booleans(),
                "spans": st.sampled_from(["own", "all"]),
                "rank": st.integers(0, 9),
                "enabled": st.booleans(),
            },
        )
    )


@given(call=_given_settings(), config=_EXTRAS)
def test_the_carrier_goes_there_and_back(
    call: dict[str, object], config: dict[str, object]
) -> None:
    """Whatever was resolved arrives in the child, through JSON, with its sources."""
    cwd = Path("/project")
    settings = resolve(call=call, config=config, environ={}, cwd=cwd, home=Path("/nowhere"))
    carrier = json.loads(json.dumps(settings.to_carrier()))
    if settings.enabled:
        assert settings.output_dir.is_absolute()
    else:
        assert carrier["settings"] == {"enabled": False}
    assert Settings.from_carrier(carrier, {}) == settings


def test_the_child_has_its_own_rank(place: Place) -> None:
    """A child keeps the parent's rank unless its launcher gave it one, or an argument did."""
    carrier = place.resolve({"RANK": "1", "WORLD_SIZE": "4"}).to_carrier()
    assert Settings.from_carrier(carrier, {}).rank == 1
    child = Settings.from_carrier(carrier, {"RANK": "2"})
    assert (child.rank, child.world_size, child.source("rank")) == (2, 4, "RANK")
    carrier = place.resolve(call={"rank": 5}).to_carrier()
    assert Settings.from_carrier(carrier, {"RANK": "2"}).rank == 5
    assert not Settings.from_carrier(carrier, {"CIRRON_ENABLED": "no"}).enabled


def test_what_json_cannot_say_stays_behind(place: Place) -> None:
    """Objects, non-finite numbers and bottomless values in extras do not break the carrier."""
    bottomless: dict[str, object] = {"n": 1}
    bottomless["again"] = bottomless
    settings = place.resolve(
        config={"hook": print, "x": {"bad": float("nan"), "ok": 1, "l": [print]}, "b": bottomless}
    )
    extras = Settings.from_carrier(json.loads(json.dumps(settings.to_carrier())), {}).extras
    assert extras["x"] == {"ok": 1, "l": [None]}
    assert extras.keys() == {"x", "b"}
    assert "'b': {'n': 1" in repr(settings)


@pytest.mark.parametrize(
    ("carrier", "message"),
    [
        ({"settings": 3}, "'settings' must hold keys and values"),
        ({"settings": {"sample_rate": 7}}, "sample_rate = 7 (from CIRRON_OTEL_CARRIER)"),
    ],
)
def test_a_broken_carrier(carrier: dict[str, object], message: str) -> None:
    """A carrier that was tampered with is refused; keys of another version are passed over."""
    with pytest.raises(ConfigurationError) as caught:
        Settings.from_carrier(carrier, {})
    assert message in str(caught.value)
    assert Settings.from_carrier({"settings": {"newer": 1}, "more": 2}, {}) == Settings()


# -- this process ----------------------------------------------------------------------------

_PROGRAM = """
import sys
from cirron_otel.settings import resolve
settings = resolve(call={})
print(settings.output_dir, settings.sample_rate, settings.run_id, settings.source("sample_rate"))
print(*sorted({"tomllib", "difflib", "yaml", "opentelemetry", "torch"} & sys.modules.keys()))
"""


def test_the_process_itself_is_the_default_source(place: Place) -> None:
    """Environment, working directory and home are this process's, and little is imported."""
    environ = {
        "PYTHONPATH": str(Path(setting_rules.__file__).parents[1]),
        "HOME": str(place.home),
        "CIRRON_RUN_ID": "r-1",
    }
    command = [sys.executable, "-c", _PROGRAM]
    place.project.write_text('{"profiling": {"sample_rate": 0.25}}')
    done = subprocess.run(
        command, cwd=place.cwd, env=environ, capture_output=True, text=True, check=True
    )
    first, second = done.stdout.splitlines()
    assert first == f"{place.cwd / '.cirron'} 0.25 r-1 {place.project}"
    assert second == ""
