"""What each setting may be: how a value given as text, number or list becomes the one that counts.

Nothing here knows where a value came from or which source wins; that is
:mod:`cirron_otel.settings`. Text is read alike from every source, because an environment variable
holds only text and YAML makes text of things like ``1e-3``. Pure functions, any thread, no I/O.
"""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, SupportsFloat, SupportsIndex

from cirron_otel.errors import ConfigurationError

#: The frameworks with hooks, the one that may own the loop first.
FRAMEWORKS = ("transformers", "vllm", "lightning", "tensorflow", "accelerate", "sklearn", "torch")
_FRAMEWORK_ALIASES = {
    "keras": "tensorflow",
    "pytorch": "torch",
    "pytorch_lightning": "lightning",
    "scikit-learn": "sklearn",
}

SNAPSHOT_MODES = ("stats", "sampled", "full")
OUTPUTS = ("spool", "log", "stdout")
RESOURCES = ("cpu", "memory")
SPAN_CHOICES = ("own", "all")
TERMINAL_CHOICES = ("auto", "summary", "progress", "none")
FORWARD_CHOICES = ("thread", "process", "off")
TEES = ("wandb", "tensorboard", "mlflow", "accelerate")
_TEE_ALIASES = {"tensorboardx": "tensorboard"}
MIRRORS = ("record_function", "nvtx")
RANK_CHOICES = ("all", "rank0", "first_per_node", "sampled")

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
_OFF = frozenset({"off", "none"})

_INT64_MAX = 2**63 - 1
#: Longer waits overflow what the platform can wait for; nobody means thirty years.
_LONGEST_INTERVAL_S = 1e9
_SHOWN_CHARS = 120

MASK = "***"
_SECRETS = frozenset({"api_key", "webhook"})
_SECRET_WORDS = frozenset(
    {
        "apikey",
        "authorization",
        "cookie",
        "credential",
        "credentials",
        "header",
        "headers",
        "key",
        "passwd",
        "password",
        "secret",
        "secrets",
        "token",
    }
)
_DEEPEST = 8
_LOGIN = re.compile(r"//[^/?#\s'\"]*@")


class Wrong(ValueError):  # noqa: N818 - never leaves this package: it becomes ConfigurationError
    """Why a value cannot be used, in words that do not repeat a secret."""


class Rule(NamedTuple):
    """How one setting is read.

    ``parse`` turns a value into the one that counts and raises for one that cannot be used;
    ``right`` says what would be right, to follow "it must be". ``per_process`` settings belong
    to one process of a run: no file may set them, and their environment variables are the
    launcher's, which this package does not own.
    """

    parse: Callable[[object], object]
    right: str
    per_process: bool = False


def is_secret(name: str) -> bool:
    """Whether a setting, or a key inside ``extras``, must never be shown or handed on."""
    words = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", name)
    return name in _SECRETS or any(word.lower() in _SECRET_WORDS for word in words)


def shown(name: str, value: object) -> str:
    """A value as messages show it: secrets masked, long texts cut. Never raises."""
    if value is not None and is_secret(name):
        return MASK
    try:
        value = masked(value) if isinstance(value, (dict, list)) else value
        text = repr(os.fspath(value) if isinstance(value, os.PathLike) else value)
    except Exception:  # noqa: BLE001 - a foreign repr must not hide the message it is part of
        text = f"<{type(value).__name__}>"
    if name in {"api_endpoint", "otlp"}:
        text = _LOGIN.sub(f"//{MASK}@", text)
        text = re.sub(r"([?#])[^'\"]*", rf"\1{MASK}", text)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def masked(value: object, depth: int = 0) -> object:
    """A copy of a value for showing: secrets' values and the logins of URLs are masked."""
    if depth > _DEEPEST:
        return "..."
    if isinstance(value, dict):
        return {
            key: MASK if item is not None and is_secret(str(key)) else masked(item, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [masked(item, depth + 1) for item in value]
    if isinstance(value, tuple):
        return tuple(masked(item, depth + 1) for item in value)
    return _LOGIN.sub(f"//{MASK}@", value) if isinstance(value, str) else value


def json_of(value: object, depth: int = 0) -> object:
    """A value in JSON types, for a child process.

    Left out of dicts are the keys of secrets and what JSON cannot say; in lists that is null.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Path):
        return os.path.abspath(value)  # noqa: PTH100 - resolve() would follow links
    if depth <= _DEEPEST and isinstance(value, Mapping):
        return {
            key: kept
            for key, item in value.items()
            if isinstance(key, str) and not is_secret(key)
            if (kept := json_of(item, depth + 1)) is not None or item is None
        }
    if depth <= _DEEPEST and isinstance(value, (list, tuple)):
        return [json_of(item, depth + 1) for item in value]
    return None


def parse(name: str, value: object, source: str) -> object:
    """Read one setting; ``source`` says where the value came from.

    Raises ``ConfigurationError`` naming the setting, the value (secrets masked), the source and
    what would be right.
    """
    rule = RULES[name]
    try:
        return rule.parse(value)
    except (ValueError, TypeError, OverflowError, RuntimeError) as exc:
        why = f"{exc}; " if isinstance(exc, Wrong) else ""
        # "from None": the cause's own text repeats the value, also where that is a secret.
        raise ConfigurationError(
            f"{name} = {shown(name, value)} (from {source}) cannot be used: "
            f"{why}it must be {rule.right}"
        ) from None


# -- one kind of value each ------------------------------------------------------------------


def boolean(value: object) -> bool:
    """True or false, as such, as 1 or 0, or in one of the usual words."""
    word = value.strip().lower() if isinstance(value, str) else str(value).lower()
    if isinstance(value, (str, bool, int)) and word in _TRUE | _FALSE:
        return word in _TRUE
    raise ValueError


def _number(value: object) -> int | float:
    if isinstance(value, bool):
        raise TypeError
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            return float(value)
    if isinstance(value, SupportsIndex):
        try:
            return operator.index(value)
        except TypeError:  # numpy's and torch's scalars have the method whatever they hold
            pass
    if isinstance(value, SupportsFloat):
        return float(value)
    raise TypeError


def whole(low: int) -> Callable[[object], int]:
    """A whole number of at least ``low``; ``1e9`` and ``2.0`` are whole numbers too."""

    def parse_whole(value: object) -> int:
        number = _number(value)
        if number != int(number) or not low <= number <= _INT64_MAX:
            raise ValueError
        return int(number)

    return parse_whole


def fraction(value: object) -> float:
    """A number from 0 to 1."""
    number = float(_number(value))
    if not 0 <= number <= 1:
        raise ValueError
    return number


def seconds(value: object) -> float:
    """A finite number of seconds above 0."""
    number = float(_number(value))
    if not (math.isfinite(number) and 0 < number <= _LONGEST_INTERVAL_S):
        raise ValueError
    return number


def amount(value: object) -> float:
    """A finite number, 0 or more."""
    number = float(_number(value))
    if not (math.isfinite(number) and 0 <= number <= _LONGEST_INTERVAL_S):
        raise ValueError
    return number


def operations(value: object) -> float | None:
    """A finite number above 0, or none."""
    if isinstance(value, str) and value.strip().lower() == "none":
        return None
    number = float(_number(value))
    if not (math.isfinite(number) and number > 0):
        raise ValueError
    return number


def choice(options: tuple[str, ...]) -> Callable[[object], str]:
    """One word out of ``options``, in any case."""

    def parse_choice(value: object) -> str:
        word = _text(value).lower()
        if word not in options:
            raise ValueError
        return word

    return parse_choice


def snapshot_mode(value: object) -> str | None:
    """A snapshot mode; ``None`` means off, as do the words off and none, and YAML's ``off``."""
    if value is None or value is False:
        return None
    word = _text(value).lower()
    return None if word in _OFF else choice(SNAPSHOT_MODES)(word)


def names(
    options: tuple[str, ...], aliases: dict[str, str] | None = None, *, none_wins: bool = False
) -> Callable[[object], tuple[str, ...]]:
    """Several words out of ``options``, given as a list or as text with commas.

    The result has no repeats and the order of ``options``. ``none`` alone is the empty choice;
    beside other words it empties the list where ``none_wins`` and is refused elsewhere.
    """

    def parse_names(value: object) -> tuple[str, ...]:
        given = value.split(",") if isinstance(value, str) else value
        if not isinstance(given, Iterable) or isinstance(given, (bytes, bytearray, Mapping)):
            raise TypeError
        found: set[str] = set()
        for item in given:
            if not isinstance(item, str):
                raise Wrong(f"{type(item).__name__} is not a name")
            word = item.strip().lower()
            word = (aliases or {}).get(word, word)
            if word and word not in options and word != "none":
                raise Wrong(f"{item.strip()!r} is not known")
            found.add(word)
        found.discard("")
        if isinstance(value, str) and not found:
            raise Wrong("it is empty")
        if "none" in found and len(found) > 1 and not none_wins:
            raise Wrong("'none' stands beside other names")
        return () if "none" in found else tuple(word for word in options if word in found)

    return parse_names


def mirror(value: object) -> str | None:
    """Where scopes are shown while they are open; ``off`` and ``none`` for nowhere."""
    word = _text(value).lower()
    return None if word in _OFF else choice(MIRRORS)(word)


def framework_names(value: object) -> tuple[str, ...] | None:
    """Names of frameworks; ``auto`` leaves the choice to what is installed."""
    if isinstance(value, str) and value.strip().lower() == "auto":
        return None
    return names(FRAMEWORKS, _FRAMEWORK_ALIASES)(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        # An id such as 0123 is the number 83 to YAML: only its writer can put that right.
        raise Wrong(f"it is of type {type(value).__name__}, and text has to be quoted")
    text = value.strip()
    if not text:
        raise Wrong("it is empty")
    if not text.isprintable():  # also refuses surrogates, which no UTF-8 file can hold
        raise Wrong("it has characters that cannot be printed")
    return text


def token(value: object) -> str:
    """A secret that goes into an HTTP header: printable ASCII without spaces."""
    text = _text(value)
    if not text.isascii() or " " in text:
        raise ValueError
    return text


def directory(value: object) -> Path:
    """A directory, which need not exist; ``~`` is the home directory."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise TypeError
    if not path.strip():
        raise Wrong("it is empty")
    if "\0" in path:
        raise Wrong("it has a NUL character")
    if path.lower().endswith((".yaml", ".yml")):
        raise Wrong("a settings file goes into config_path=")
    return Path(path).expanduser()


def endpoint(value: object) -> str:
    """The base URL of an HTTP service, without a slash at its end."""
    from urllib.parse import urlsplit  # noqa: PLC0415 - only where an endpoint is given

    text = token(value)
    parts = urlsplit(text)
    if parts.username is not None or parts.password is not None:
        raise Wrong("a password does not belong in it, use api_key")
    if parts.query or parts.fragment or "?" in text or "#" in text:
        raise Wrong("it has a query or a fragment")
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.port == 0:
        raise ValueError
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def webhook_url(value: object) -> str:
    """The URL of a webhook. What is wrong with it is not said with the URL, which is a key."""
    from urllib.parse import urlsplit  # noqa: PLC0415 - only where one is given

    text = token(value)
    try:
        parts = urlsplit(text)
        good = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise Wrong("it is no URL of a server")
    return text


def url_path(value: object) -> str:
    """The path of a URL, from its slash on."""
    text = token(value)
    if not text.startswith("/") or text.startswith("//") or "?" in text or "#" in text:
        raise ValueError
    return text


def headers(value: object) -> dict[str, str]:
    """Headers of HTTP or gRPC, given as a mapping or as OTel's text ``name=value,name=value``."""
    if isinstance(value, str):
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        if not all(separator for _, separator, _ in pairs):
            raise Wrong("a part of it has no '='")
        from urllib.parse import unquote  # noqa: PLC0415 - only where headers are given

        given: Mapping[object, object] = {
            name.strip(): unquote(text.strip()) for name, _, text in pairs
        }
    elif isinstance(value, Mapping):
        given = value
    else:
        raise TypeError
    found: dict[str, str] = {}
    for name, text in given.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name):
            raise Wrong("one of the names is no header's name")
        if not isinstance(text, str) or not text.isascii() or not text.isprintable():
            raise Wrong("one of the values is no text of printable ASCII characters")
        found[name] = text
    return found


def otlp_receivers(value: object) -> tuple[dict[str, object], ...] | bool:
    """Receivers of OTLP: a URL, a mapping, or several of them; ``none`` (or false) for none.

    The result holds one mapping with ``endpoint`` for each; ``True`` stands for what OTel's
    variables, or its defaults, say. A mapping from URLs to options is several receivers. What
    the options may be is known to :mod:`cirron_otel.destinations.otlp_settings`.
    """
    word = value.strip().lower() if isinstance(value, str) else value
    if word is False or (isinstance(word, str) and word in _OFF):
        return ()
    if word is True or word == "true":
        return True
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    elif isinstance(value, Mapping):
        several = not value.keys() & {"endpoint", "traces_endpoint"}
        value = [_receiver(u, o) for u, o in value.items()] if several else [value]
    if not isinstance(value, Iterable) or isinstance(value, (bytes, bytearray)):
        raise TypeError
    found = tuple(
        {str(k): v for k, v in one.items()} if isinstance(one, Mapping) else _receiver(one, None)
        for one in value
    )
    if not found:
        raise Wrong("it is empty")
    return found


def _receiver(url: object, options: object) -> dict[str, object]:
    if options is not None and not isinstance(options, Mapping):
        raise Wrong(f"{type(options).__name__} stands where options of a receiver should")
    return {"endpoint": token(url), **{str(key): item for key, item in (options or {}).items()}}


def monitor_options(value: object) -> bool | dict[str, object]:
    """Whether to monitor, or the monitor's options, whose meaning is the monitor's to judge."""
    if isinstance(value, Mapping):
        return {_text(key): item for key, item in value.items()}
    return boolean(value)


def watchdog_limits(value: object) -> bool | float | dict[str, object]:
    """Whether to look for hangs, or after how many seconds without movement, or by phase."""
    if isinstance(value, Mapping):
        return {_text(key): item for key, item in value.items()}
    try:
        return boolean(value)
    except ValueError:
        return seconds(value)


def finding_names(value: object) -> tuple[str, ...]:
    """Severities or kinds of findings, as a list or as text with commas; ``none`` for none."""
    given = value.split(",") if isinstance(value, str) else value
    if not isinstance(given, Iterable) or isinstance(given, (bytes, bytearray, Mapping)):
        raise TypeError
    found = tuple(dict.fromkeys(_text(item).lower() for item in given))
    return () if found == ("none",) else found


def _listed(options: tuple[str, ...]) -> str:
    return ", ".join(options[:-1]) + f" or {options[-1]}"


def _count(low: int) -> str:
    return f"a whole number, {low} or more"


_BOOLEAN = Rule(boolean, "true or false (1 or 0, yes or no, on or off)")
_ID = Rule(_text, "a text of printable characters")
#: Every setting by name, in the order in which they are shown.
RULES: dict[str, Rule] = {
    "enabled": _BOOLEAN,
    "output_dir": Rule(directory, "the path of a directory"),
    "frameworks": Rule(
        framework_names,
        "names out of transformers, lightning, tensorflow (or keras), accelerate, sklearn, "
        "torch (or pytorch); none; or auto",
    ),
    "snapshots": Rule(snapshot_mode, f"{_listed((*SNAPSHOT_MODES, 'off'))}"),
    "sample_rate": Rule(fraction, "a number from 0 to 1"),
    "snapshot_every": Rule(whole(0), f"a number of steps: {_count(0)}"),
    "snapshot_max_bytes": Rule(whole(1), f"a number of bytes: {_count(1)}"),
    "flush_interval": Rule(seconds, "a number of seconds above 0 and at most 1e9"),
    "spool_max_bytes": Rule(whole(1), f"a number of bytes: {_count(1)}"),
    "api_key": Rule(token, "a text of printable ASCII characters without spaces"),
    "api_endpoint": Rule(endpoint, "a URL such as https://api.cirron.com"),
    "ingest_path": Rule(url_path, "the path of a URL such as /v1/traces"),
    "workspace_id": _ID,
    "run_id": _ID,
    "pipeline_id": _ID,
    "deployment_id": _ID,
    "model_id": _ID,
    "otlp": Rule(
        otlp_receivers,
        "a URL such as http://collector:4318, several of them, a mapping from URL to options, "
        "or none",
    ),
    "headers": Rule(
        headers, "a mapping from names to texts, or text such as name=value,name=value"
    ),
    "forward": Rule(choice(FORWARD_CHOICES), _listed(FORWARD_CHOICES)),
    "exit_budget": Rule(amount, "a number of seconds, 0 or more"),
    "heartbeat": Rule(amount, "a number of seconds, 0 (for none) or more"),
    "ranks": Rule(choice(RANK_CHOICES), _listed(RANK_CHOICES)),
    "export_rate": Rule(amount, "a number of spans per second, 0 (for none) or more"),
    "export_burst": Rule(whole(0), _count(0)),
    "request_sample_ratio": Rule(fraction, "a number from 0 to 1"),
    "tenant_rate": Rule(amount, "a number of requests per second, 0 (for no limit) or more"),
    "output": Rule(names(OUTPUTS, none_wins=True), f"{_listed((*OUTPUTS, 'none'))}, or several"),
    "trace_buffer_max_spans": Rule(whole(0), _count(0)),
    "trace_max_spans": Rule(whole(10), _count(10)),
    "resources": Rule(names(RESOURCES), "names out of cpu, memory; or none"),
    "signals": _BOOLEAN,
    "spans": Rule(choice(SPAN_CHOICES), _listed(SPAN_CHOICES)),
    "set_global": _BOOLEAN,
    "start_iteration": Rule(whole(0), _count(0)),
    "monitor": Rule(monitor_options, "true, false, or a mapping of the monitor's options"),
    "stop_on": Rule(finding_names, "severities (warning, critical) or kinds of findings"),
    "webhook": Rule(webhook_url, "a URL such as https://hooks.example/abc"),
    "tee": Rule(
        names(TEES, _TEE_ALIASES), "names out of wandb, tensorboard, mlflow, accelerate; or none"
    ),
    "mirror": Rule(mirror, "record_function, nvtx or off"),
    "flops_per_token": Rule(operations, "a number of operations above 0, or none"),
    "device_peak_flops": Rule(operations, "a number of operations per second above 0, or none"),
    "profile_on": Rule(finding_names, "severities (warning, critical) or kinds of findings"),
    "watchdog": Rule(
        watchdog_limits, "true, false, seconds above 0, or a mapping from phases to seconds"
    ),
    "terminal": Rule(choice(TERMINAL_CHOICES), _listed(TERMINAL_CHOICES)),
    "rank": Rule(whole(0), _count(0), per_process=True),
    "world_size": Rule(whole(1), _count(1), per_process=True),
    "local_rank": Rule(whole(0), _count(0), per_process=True),
}
