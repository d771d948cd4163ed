"""What may be wrong with how a service is set up: each thing, and what to do about it.

For ``cirron-otel doctor``. Here is what holds for any service on this machine: versions, settings,
the place on disk. What one application says of itself is in
:mod:`cirron_otel.serving.checkup_app`. Nothing is sent, and nothing stays behind.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec import UNSET

from cirron_otel.core import COMPILED
from cirron_otel.errors import CirronError
from cirron_otel.settings import Settings, resolve
from cirron_otel.spool import Spool

#: ``ok``; ``note``, nothing to mend; ``warning``, something is lost or odd; ``error``, nothing is
#: recorded.
State = Literal["ok", "note", "warning", "error"]


class Found(NamedTuple):
    """One thing that was looked at."""

    state: State
    what: str
    #: What to do, one step a line.
    todo: str = ""


#: What the session's spans, the receivers and the instrumentations have to agree about.
_SDK = "opentelemetry-sdk"
_API = "opentelemetry-api"
_INSTRUMENTATION = "opentelemetry-instrumentation"
#: Servers and what gives them a span a request.
_SERVERS = ("fastapi", "starlette", "flask", "django", "falcon", "pyramid", "tornado", "grpcio")
#: The ends of the names of what ASGI's instrumentation makes of each part of an answer.
_PARTS = (" http send", " http receive")
_NEWEST = 20
_MANY_PARTS = 10

EXCLUDE_SPANS = 'FastAPIInstrumentor.instrument_app(app, exclude_spans=["send", "receive"])'


def check_versions() -> Iterator[Found]:
    """Python, this library, OpenTelemetry and the instrumentations of servers."""
    hot = "compiled" if COMPILED else "in Python"
    state: State = "ok" if COMPILED or os.environ.get("CIRRON_OTEL_PURE") == "1" else "note"
    yield Found(
        state,
        f"Python {platform.python_version()}, cirron-otel {_version('cirron-otel')}, "
        f"hot path {hot}",
        "" if state == "ok" else "with a C compiler, installing it again makes scopes cheaper",
    )
    sdk, api = _version(_SDK), _version(_API)
    if sdk != api:
        yield Found(
            "warning", f"{_SDK} is {sdk}, but {_API} is {api}", f"pip install -U {_API} {_SDK}"
        )
    else:
        yield Found("ok", f"OpenTelemetry {sdk}")
    yield from _check_instrumentations()


def _check_instrumentations() -> Iterator[Found]:
    base = _version(_INSTRUMENTATION)
    for server in _SERVERS:
        installed = _version(server)
        if installed is None:
            continue
        name = f"{_INSTRUMENTATION}-{server.removesuffix('io')}"
        found = _version(name)
        if found is None:
            continue
        if found != base:
            yield Found(
                "warning",
                f"{name} is {found}, but {_INSTRUMENTATION} is {base}",
                f"pip install -U {_INSTRUMENTATION} {name}",
            )
        else:
            yield Found("ok", f"{server} {installed}, {name} {found}")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_settings(directory: Path | None) -> tuple[Settings | None, list[Found]]:
    """What ``profile()`` would be told here, and whether it would record; None: it would refuse.

    ``directory`` stands for the output directory.
    """
    try:
        settings = resolve(call={} if directory is None else {"output_dir": str(directory)})
    except CirronError as error:
        return None, [Found("error", f"profile() would refuse the settings: {error}")]
    if not settings.enabled:
        return settings, [
            Found(
                "error",
                f"recording is switched off by {settings.source('enabled')}",
                "unset CIRRON_ENABLED",
            )
        ]
    found = [Found("ok", f"records in {settings.output_dir} ({settings.source('output_dir')})")]
    if "spool" not in settings.output:
        found = [
            Found(
                "warning",
                f"no spool is kept: output is {', '.join(settings.output) or 'none'} "
                f"({settings.source('output')}), so nothing is there to read or to send",
            )
        ]
    found.append(_check_receivers(settings))
    return settings, found


def _check_receivers(settings: Settings) -> Found:
    receivers = []
    if settings.api_key:
        receivers.append(settings.api_endpoint)
    if settings.otlp or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        receivers.append("an OTLP receiver")
    if not receivers:
        return Found(
            "note",
            "nothing is sent: there is no receiver",
            "set OTEL_EXPORTER_OTLP_ENDPOINT or CIRRON_API_KEY, where traces shall leave the "
            "machine",
        )
    if settings.forward == "off":
        return Found(
            "note",
            f"this process sends nothing: forward is off ({settings.source('forward')})",
            f"run beside it: cirron-otel forward {settings.output_dir}",
        )
    if settings.otlp and util.find_spec("opentelemetry.proto") is None:
        return Found(
            "warning", "OTLP is asked for, but its format is not installed",
            "pip install 'cirron-otel[otlp]'",
        )  # fmt: skip
    return Found("ok", f"sends to {' and '.join(receivers)}")


def check_spool(settings: Settings) -> Iterator[Found]:
    """Whether the output directory can be written, locked and renamed in, and has room."""
    root = settings.output_dir
    made = root if root.is_dir() else _nearest(root)
    try:
        _try_writing(made)
    except OSError as error:
        yield Found(
            "error",
            f"{made} cannot be written: {error.strerror or error}",
            f"make it writable for {_user()}, or set CIRRON_OUTPUT_DIR to another directory",
        )
        return
    free = shutil.disk_usage(made).free
    if free < settings.spool_max_bytes:
        yield Found(
            "warning",
            f"{made} has {free // 1_000_000} MB of room; the spool may take "
            f"{settings.spool_max_bytes // 1_000_000} MB before it drops what is oldest",
            "set CIRRON_SPOOL_MAX_BYTES lower, or make room",
        )
    else:
        yield Found("ok", f"{made} can be written")
    if root.is_dir():
        yield from _check_parts(Spool(root))


def _nearest(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _user() -> str:
    return f"user {os.getuid()}"


def _try_writing(directory: Path) -> None:
    """What the flush thread does: lock, write, rename. Raises ``OSError``."""
    with tempfile.TemporaryDirectory(prefix=".cirron-doctor-", dir=directory) as name:
        written = Path(name) / "file.tmp"
        with written.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
        written.rename(Path(name) / "file")


def _check_parts(spool: Spool) -> Iterator[Found]:
    """Spans of parts of answers in the newest files: what nobody wants to pay for."""
    count = 0
    for path in spool.files()[-_NEWEST:]:
        try:
            rows = spool.read(path).spans
        except (CirronError, OSError):
            continue  # gone meanwhile, or not ours
        count += sum(row.otel is not UNSET and row.name.endswith(_PARTS) for row in rows)
    if count > _MANY_PARTS:
        yield Found(
            "warning",
            f"the newest recordings have {count} spans of single parts of requests and answers "
            "(`http send`, `http receive`)",
            EXCLUDE_SPANS,
        )
