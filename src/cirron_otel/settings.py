"""All settings of one run, resolved before ``profile()`` has any effect.

Sources, the strongest first::

    profile(...)             "argument"
    profile(config={...})    "config="
    cirron.yaml, profiling:  its path; found upwards from the working directory, or config_path=
    Cirron(...)              "Cirron()"
    CIRRON_* environment     the variable's name; an empty variable counts as unset
    ~/.cirron/config.toml    its path; the table [default]
    defaults                 "default"

Every value given is checked, also one that a stronger source overrules, and one that cannot be
used raises ``ConfigurationError``. Two things stand outside the order: ``CIRRON_ENABLED=false``
turns everything off whatever else is said, and the numbers of the process (rank, world size) come
from the launcher's variables and may not stand in a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final, Literal, cast

import msgspec

from cirron_otel import setting_rules as rules
from cirron_otel.errors import ConfigurationError
from cirron_otel.yaml_file import find_project_file, read_project_file, read_user_file

#: Where a child process finds the settings of its parent (see ``Settings.to_carrier``).
CARRIER_SOURCE = "CIRRON_OTEL_CARRIER"

_DEFAULT = "default"
_ARGUMENT = "argument"
_EXTRAS = "extras"

# The first variable that is set counts; these are torchrun's and Slurm's names.
_LAUNCHER = {
    "rank": ("RANK", "LOCAL_RANK", "SLURM_PROCID"),
    "world_size": ("WORLD_SIZE", "SLURM_NTASKS"),
    "local_rank": ("LOCAL_RANK", "SLURM_LOCALID"),
}
# Settings of the existing SDK that are about loading data: not ours, and no misspellings either.
_FOREIGN = frozenset({"load_warn_bytes", "load_max_bytes"})
_FOREIGN_PREFIXES = ("CIRRON_SECRET_", "CIRRON_OTEL_", "CIRRON_LOAD_")

_LONG_INTERVAL_S = 600.0


class NotGiven(Enum):
    """The type of :data:`NOT_GIVEN`."""

    NOT_GIVEN = "NOT_GIVEN"

    def __repr__(self) -> str:
        """As it reads in a signature."""
        return self.value


#: Stands for an argument that was not given, where ``None`` has a meaning (``snapshots=None``).
NOT_GIVEN: Final = NotGiven.NOT_GIVEN


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting of one run. ``sources`` says of each where it came from.

    ``frameworks`` is ``None`` for "those that are installed" and ``()`` for none; ``snapshots``
    is ``None`` for off; ``output`` is ``()`` for "none"; ``otlp`` has a mapping
    with ``endpoint`` and options for each receiver, is ``None`` for "what OTel's variables ask
    for" and ``()`` for none; ``headers`` go to its receivers. ``extras`` holds the keys
    of the ``profiling:`` section and of ``config=`` that are no settings, such as
    ``torch: {epoch_steps: 500}``. From :func:`resolve`, ``output_dir`` is absolute, so that a
    later ``os.chdir`` does not move the spool.
    """

    enabled: bool = True
    output_dir: Path = Path("./.cirron")
    frameworks: tuple[str, ...] | None = None
    snapshots: Literal["stats", "sampled", "full"] | None = "stats"
    sample_rate: float = 0.01
    snapshot_every: int = 0
    snapshot_max_bytes: int = 10_000_000_000
    flush_interval: float = 1.0
    spool_max_bytes: int = 1_000_000_000
    api_key: str | None = None
    api_endpoint: str = "https://api.cirron.com"
    ingest_path: str = "/v1/traces"
    workspace_id: str | None = None
    run_id: str | None = None
    pipeline_id: str | None = None
    deployment_id: str | None = None
    model_id: str | None = None
    otlp: tuple[dict[str, object], ...] | bool | None = None
    headers: dict[str, str] | None = None
    forward: Literal["thread", "process", "off"] = "thread"
    exit_budget: float = 3.0
    heartbeat: float = 60.0
    ranks: Literal["all", "rank0", "first_per_node", "sampled"] = "all"
    export_rate: float = 200.0
    export_burst: int = 20_000
    request_sample_ratio: float = 1.0
    tenant_rate: float = 0.0
    output: tuple[str, ...] = ("spool",)
    trace_buffer_max_spans: int = 100_000
    trace_max_spans: int = 2000
    resources: tuple[str, ...] = ()
    signals: bool = True
    spans: Literal["own", "all"] = "own"
    set_global: bool = False
    start_iteration: int = 0
    monitor: bool | dict[str, object] = False
    stop_on: tuple[str, ...] = ()
    webhook: str | None = None
    tee: tuple[str, ...] = ()
    mirror: Literal["record_function", "nvtx"] | None = None
    profile_on: tuple[str, ...] = ()
    flops_per_token: float | None = None
    device_peak_flops: float | None = None
    watchdog: bool | float | dict[str, float] = True
    terminal: Literal["auto", "summary", "progress", "none"] = "auto"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    extras: dict[str, object] = msgspec.field(default_factory=dict)
    sources: dict[str, str] = msgspec.field(default_factory=dict)

    def source(self, name: str) -> str:
        """Where the setting ``name`` came from; ``"default"`` if nobody gave it."""
        return self.sources.get(name, _DEFAULT)

    def describe(self) -> list[tuple[str, str, str]]:
        """(name, value, source) of every setting as text, secrets masked, for people to read."""
        return [(name, self._text(name), self.source(name)) for name in (*rules.RULES, _EXTRAS)]

    def _text(self, name: str) -> str:
        value: object = getattr(self, name)
        if value is None:
            return {"frameworks": "auto", "snapshots": "off"}.get(name, "not set")
        if rules.is_secret(name):
            return rules.MASK
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, tuple):
            return ", ".join(map(_item_text, value)) or "none"
        if isinstance(value, dict):
            return repr(rules.masked(value)) if value else "none"
        return str(value)

    def __rich_repr__(self) -> list[tuple[str, object]]:
        """The fields, secrets masked: the method that msgspec writes would show them."""
        fields = {name: cast("object", getattr(self, name)) for name in self.__struct_fields__}
        return list(cast("dict[str, object]", rules.masked(fields)).items())

    def __repr__(self) -> str:
        """Like any struct's, secrets masked."""
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def to_carrier(self) -> dict[str, object]:
        """What a child process needs, as JSON types; no secret and no default is in it.

        Receivers of OTLP stay out too: a child sends nothing. Left out of ``extras`` are keys
        that may hold a secret and what JSON has no word for.
        """
        settings: dict[str, object] = {}
        for name in rules.RULES:
            if rules.is_secret(name) or name == "otlp":
                continue
            value: object = getattr(self, name)
            if name in self.sources or value != _DEFAULTS[name]:
                settings[name] = rules.json_of(value)
        return {
            "settings": settings,
            "extras": rules.json_of(self.extras),
            "sources": {n: source for n, source in self.sources.items() if not rules.is_secret(n)},
        }

    @classmethod
    def from_carrier(
        cls, carrier: Mapping[str, object], environ: Mapping[str, str] | None = None
    ) -> Settings:
        """The parent's settings in a child, read back from :meth:`to_carrier`.

        ``environ`` (by default this process's) has a say in two things: ``CIRRON_ENABLED=false``
        turns the child off, and the launcher's variables name the child's own rank, unless the
        parent's was set by argument. Keys that are not known are passed over: parent and child
        may be of two versions. Raises ``ConfigurationError``.
        """
        environ = os.environ if environ is None else environ
        if _switched_off(environ):
            return cls(enabled=False, sources={"enabled": "CIRRON_ENABLED"})
        given, extras, sources = (
            _carried(carrier, part) for part in ("settings", _EXTRAS, "sources")
        )
        found = _Found()
        for name in (name for name in rules.RULES if name in given):
            source = sources.get(name, _DEFAULT)
            if given[name] is None and _DEFAULTS[name] is None:
                found.values[name] = None
            else:
                found.values[name] = rules.parse(name, given[name], CARRIER_SOURCE)
            if isinstance(source, str) and source != _DEFAULT:
                found.sources[name] = source
        for name, (value, source) in _launched(environ).items():
            if found.sources.get(name) not in {_ARGUMENT, "Cirron()"}:
                found.values[name], found.sources[name] = value, source
        found.extras = extras
        if isinstance(where := sources.get(_EXTRAS), str):
            found.sources[_EXTRAS] = where
        return found.settings()


def _item_text(item: object) -> str:
    if not isinstance(item, dict):
        return str(item)
    options = {key: one for key, one in item.items() if key != "endpoint"}
    return f"{rules.masked(item.get('endpoint', ''))} {rules.masked(options or '')}".strip()


_DEFAULTS: dict[str, object] = {name: getattr(Settings(), name) for name in rules.RULES}


def resolve(  # noqa: PLR0913 - one parameter per source, all by keyword
    *,
    call: Mapping[str, object],
    constructor: Mapping[str, object] | None = None,
    config: Mapping[str, object] | None = None,
    config_path: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    home: Path | None = None,
) -> Settings:
    """Find every setting; see the module's text for the order of the sources.

    ``call`` holds the arguments of ``profile()`` (``path`` is ``output_dir``), ``constructor``
    those of ``Cirron()``. A value that is ``NOT_GIVEN``, or ``None`` for anything but
    ``snapshots``, counts as not given. ``environ``, ``cwd`` and ``home`` are this process's
    unless given. With ``CIRRON_ENABLED=false`` or ``enabled=False`` in ``call`` nothing else is
    read or checked.

    Raises ``ConfigurationError``, and ``CirronDependencyError`` for a yaml file without PyYAML.
    Reads at most two small files, on the calling thread. Warns by logging of keys that look
    like misspelt settings, of numbers of the launcher that are none, and of odd intervals.
    """
    environ = os.environ if environ is None else environ
    if _switched_off(environ):
        return Settings(enabled=False, sources={"enabled": "CIRRON_ENABLED"})
    call = _arguments(call, "profile()")
    constructor = _arguments(constructor or {}, "Cirron()")
    if "enabled" in call and rules.parse("enabled", call["enabled"], _ARGUMENT) is False:
        return Settings(enabled=False, sources={"enabled": _ARGUMENT})
    cwd = _working_directory() if cwd is None else cwd

    found = _Found()
    if (home := _home() if home is None else home) is not None:
        toml_path, table = read_user_file(home)
        found.add_file(table, str(toml_path), keep_extras=False)
    found.add_environment(environ)
    found.add(constructor, "Cirron()")
    if (project := _project_file(config_path, cwd)) is not None:
        found.add_file(read_project_file(project), str(project))
    if config is not None:
        found.add_file(_config_mapping(config), "config=")
    found.add(call, _ARGUMENT)
    found.tidy(cwd)
    settings = found.settings()
    if settings.flush_interval > _LONG_INTERVAL_S:
        _warn(
            "flush_interval is %g seconds (from %s): after a crash all of it may be missing",
            settings.flush_interval,
            settings.source("flush_interval"),
        )
    return settings


class _Found:
    """Values gathered from the weakest source to the strongest; each overrules the last."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}
        self.extras: dict[str, object] = {}
        self.sources: dict[str, str] = {}

    def add(self, given: Mapping[str, object], source: str) -> None:
        for name, value in given.items():
            self.values[name] = rules.parse(name, value, source)
            self.sources[name] = source

    def add_file(
        self, section: Mapping[str, object], source: str, *, keep_extras: bool = True
    ) -> None:
        """A source whose keys may be no settings: those are extras, or the ancestor's."""
        known = {name: value for name, value in section.items() if name in rules.RULES}
        for name in known:
            if rules.RULES[name].per_process:
                raise ConfigurationError(
                    f"{name} (from {source}) differs between the processes of a run: it comes "
                    f"from {_LAUNCHER[name][0]} in the environment or from an argument"
                )
        self.add(_given(known), source)
        extras = {name: value for name, value in section.items() if name not in rules.RULES}
        _warn_of_misspelt(extras.keys() - set(rules.FRAMEWORKS) - _FOREIGN, source)
        if not (keep_extras and extras):
            return
        for name, value in extras.items():
            before = self.extras.get(name)
            both = isinstance(before, dict) and isinstance(value, dict)
            self.extras[name] = {**before, **value} if both else value  # type: ignore[dict-item]
        earlier = self.sources.get(_EXTRAS)
        self.sources[_EXTRAS] = f"{source}, {earlier}" if earlier else source

    def add_environment(self, environ: Mapping[str, str]) -> None:
        variables = {f"CIRRON_{name.upper()}": name for name in rules.RULES.keys() - _LAUNCHER}
        # In the table's order, so that of two wrong values it is always the same that is named.
        for variable, name in sorted(variables.items()):
            if environ.get(variable, "").strip():
                self.add({name: environ[variable]}, variable)
        unknown = {
            key
            for key in environ
            if key.startswith("CIRRON_") and not key.startswith(_FOREIGN_PREFIXES)
        }
        _warn_of_misspelt(unknown - variables.keys(), "the environment", set(variables))
        for name, (number, variable) in _launched(environ).items():
            self.values[name], self.sources[name] = number, variable

    def tidy(self, cwd: Path | None) -> None:
        """Anchor the output directory, and take the ingest path off the end of the endpoint."""
        if cwd is not None:
            self.values["output_dir"] = cwd / cast("Path", self._now("output_dir"))
        endpoint, path = (
            cast("str", self._now("api_endpoint")),
            cast("str", self._now("ingest_path")),
        )
        # People give the whole URL as often as the base; doubled, every upload would be a 404.
        if endpoint.endswith(path) and len(endpoint) - len(path) > endpoint.index("://") + 3:
            self.values["api_endpoint"] = endpoint.removesuffix(path)

    def _now(self, name: str) -> object:
        return self.values.get(name, _DEFAULTS[name])

    def settings(self) -> Settings:
        # Each value has been through the rule of its name, which gives the field's type.
        fields = cast("dict[str, Any]", self.values)
        return Settings(**fields, extras=self.extras, sources=self.sources)


def _given(values: Mapping[str, object]) -> dict[str, object]:
    return {
        name: value
        for name, value in values.items()
        if value is not NOT_GIVEN and (value is not None or name == "snapshots")
    }


def _arguments(values: Mapping[str, object], where: str) -> dict[str, object]:
    """The arguments that were given, by the names of the settings."""
    given = _given(values)
    if "path" in given:
        path = given.pop("path")
        if given.setdefault("output_dir", path) != path:
            raise ConfigurationError(f"{where}: path and output_dir are one setting, give one")
    for name in given:
        if name not in rules.RULES:
            hint = f"; did you mean {close[0]}?" if (close := _close(name, rules.RULES)) else ""
            raise ConfigurationError(f"{where} has no setting {name!r}{hint}")
    return given


def _config_mapping(config: object) -> dict[str, object]:
    if not isinstance(config, Mapping):
        hint = "; a file goes into config_path=" if isinstance(config, (str, os.PathLike)) else ""
        raise ConfigurationError(f"config= must be a dict, not {type(config).__name__}{hint}")
    return {str(key): value for key, value in config.items()}


def _project_file(config_path: str | os.PathLike[str] | None, cwd: Path | None) -> Path | None:
    if config_path is None:
        return None if cwd is None else find_project_file(cwd)
    path = Path(config_path).expanduser()
    return path if cwd is None else cwd / path


def _switched_off(environ: Mapping[str, str]) -> bool:
    text = environ.get("CIRRON_ENABLED", "").strip()
    return bool(text) and rules.parse("enabled", text, "CIRRON_ENABLED") is False


def _launched(environ: Mapping[str, str]) -> dict[str, tuple[int, str]]:
    """The numbers of this process as its launcher gave them, with the variables' names.

    The variables are not ours, so what is no number is not an error: a warning, and the default.
    """
    numbers: dict[str, tuple[int, str]] = {}
    for name, variables in _LAUNCHER.items():
        variable = next((v for v in variables if environ.get(v, "").strip()), None)
        if variable is None:
            continue
        try:
            number = cast("int", rules.parse(name, environ[variable], variable))
        except ConfigurationError as exc:
            number = cast("int", _DEFAULTS[name])
            _warn("%s; %d is used", exc, number)
        numbers[name] = (number, variable)
    return numbers


def _working_directory() -> Path | None:
    try:
        return Path.cwd()
    except OSError:  # it was removed, or may not be read: then there is no project file
        return None


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:  # a user id without an entry, as containers have it
        return None


def _close(name: str, known: Iterable[str], cutoff: float = 0.8) -> list[str]:
    from difflib import get_close_matches  # noqa: PLC0415 - only where a name is not known

    return get_close_matches(name, list(known), n=1, cutoff=cutoff)


def _warn_of_misspelt(
    unknown: Iterable[str], source: str, known: Iterable[str] = rules.RULES
) -> None:
    for name in sorted(unknown):
        if close := _close(name, known, cutoff=0.85):
            _warn("%s in %s is not a setting; did you mean %s?", name, source, close[0])


def _warn(message: str, *values: object) -> None:
    import logging  # noqa: PLC0415 - 5 ms of import that a run without warnings saves

    logging.getLogger("cirron_otel.settings").warning(message, *values)


def _carried(carrier: Mapping[str, object], part: str) -> dict[str, object]:
    value = carrier.get(part, {})
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{CARRIER_SOURCE}: {part!r} must hold keys and values")
    return {str(key): item for key, item in value.items()}
