"""Where a run's batches go: from the settings to destinations.

``CIRRON_RUN_ID`` in the environment means the event stream of a Cirron runtime; else an API key
means the platform over HTTP; else nothing leaves the machine by way of Cirron. OTLP receivers come
beside any of the three. Every one of them reads what lies in the spool.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from cirron_otel._guard import Guard, logger
from cirron_otel.destinations.base import Destination, DestinationSpec
from cirron_otel.errors import CirronError, ConfigurationError
from cirron_otel.identity import host_name
from cirron_otel.settings import Settings
from cirron_otel.yaml_file import read_project_file, read_user_file

if TYPE_CHECKING:
    from cirron_otel.destinations.otlp_settings import OtlpTarget

#: The documented words for where Cirron's own data goes, as ``health()`` says them.
Transport = Literal["event_stream", "http", "file_only"]

RUN_VARIABLE = "CIRRON_RUN_ID"
KEY_VARIABLE = "CIRRON_API_KEY"
PROMETHEUS: Final = "prometheus"
#: Every variable of OpenTelemetry begins so.
_OTEL = "OTEL_"


def word(settings: Settings, environ: Mapping[str, str] | None = None) -> Transport:
    """Which transport the settings and the environment choose."""
    environ = os.environ if environ is None else environ
    if "spool" not in settings.output:
        return "file_only"
    if environ.get(RUN_VARIABLE, "").strip():
        return "event_stream"
    return "file_only" if settings.api_key is None else "http"


def resolve(
    settings: Settings,
    environ: Mapping[str, str] | None = None,
    *,
    joined: bool = False,
    scraped: Literal["this_host", "all", "no"] = "all",
) -> list[DestinationSpec]:
    """The destinations of a run, the platform's first; none where there is no spool to read.

    ``joined`` says that spans go through the application's own provider: then OTLP receivers
    count only where the settings name them. ``scraped`` says what is shown to Prometheus, where
    the environment asks for that: what this host records, what anybody does, or nothing.
    Makes each destination once, without any connection,
    so that what cannot be used is said now: raises ``ConfigurationError``.
    """
    environ = os.environ if environ is None else environ
    if "spool" not in settings.output:
        if settings.api_key is not None or settings.otlp:
            logger.warning(
                "cirron-otel: output (from %s) has no 'spool', so nothing is sent anywhere: "
                "what is sent is read from the spool",
                settings.source("output"),
            )
        return []
    found: list[DestinationSpec] = []
    transport = word(settings, environ)
    if transport == "event_stream":
        found.append(
            DestinationSpec(
                kind="event_stream",
                name="event_stream",
                description="event stream on standard output",
            )
        )
    elif transport == "http":
        found.append(platform_spec(settings))
    found += otlp_specs(settings, environ, joined=joined)
    if scraped != "no":
        only_host = host_name() if scraped == "this_host" else ""
        found += prometheus_specs(settings, environ, only_host)
    for spec in found:
        connect(spec).close()
    return found


def otlp_specs(
    settings: Settings, environ: Mapping[str, str], *, joined: bool = False
) -> list[DestinationSpec]:
    """The OTLP receivers of a run; see :func:`resolve`. Raises ``ConfigurationError``."""
    if settings.otlp is None and not any(name.startswith(_OTEL) for name in environ):
        return []
    from cirron_otel.destinations.otlp_signals import otlp_receivers  # noqa: PLC0415 - as connect

    try:
        targets = otlp_receivers(
            settings.otlp,
            settings.headers,
            environ,
            joined=joined,
            export_rate=settings.export_rate,
            export_burst=settings.export_burst,
        )
    except ConfigurationError as exc:
        source = settings.source("otlp")
        if source in {"default", "argument"}:
            raise
        raise ConfigurationError(f"{exc} (from {source})") from None
    common = {
        "ranks": settings.ranks,
        "request_sample_ratio": settings.request_sample_ratio,
        "tenant_rate": settings.tenant_rate,
    }
    return [otlp_spec(msgspec.structs.replace(target, **common)) for target in targets]


def otlp_spec(target: OtlpTarget) -> DestinationSpec:
    """One receiver of OTLP."""
    return DestinationSpec(
        kind="otlp",
        name=target.cursor_name,
        description=f"OTLP {target.protocol} to {target.shown}",
        options=msgspec.to_builtins(target),
    )


def prometheus_specs(
    settings: Settings, environ: Mapping[str, str], only_host: str = ""
) -> list[DestinationSpec]:
    """The port for Prometheus, where it is asked for; see :func:`resolve`."""
    if PROMETHEUS not in environ.get("OTEL_METRICS_EXPORTER", "").lower():
        return []
    from cirron_otel.destinations.prometheus_settings import prometheus_target  # noqa: PLC0415

    target = prometheus_target(environ, only_host)
    if target is None:
        return []
    options = msgspec.to_builtins(msgspec.structs.replace(target, ranks=settings.ranks))
    return [
        DestinationSpec(
            kind=PROMETHEUS,
            name=target.cursor_name,
            description=f"Prometheus at {target.url}",
            options=options,
        )
    ]


def platform_spec(settings: Settings) -> DestinationSpec:
    """The platform as the settings describe it. Raises ``ConfigurationError`` without a key."""
    if settings.api_key is None:
        raise ConfigurationError(
            "the platform needs an API key: set CIRRON_API_KEY, or Cirron(api_key=...)"
        )
    url = f"{settings.api_endpoint}{settings.ingest_path}"
    return DestinationSpec(
        kind="platform",
        name="platform",
        description=f"platform {url}",
        options={
            "endpoint": settings.api_endpoint,
            "ingest_path": settings.ingest_path,
            "api_key": settings.api_key,
            "api_key_source": settings.source("api_key"),
            "output_dir": str(settings.output_dir),
        },
    )


def connect(spec: DestinationSpec, guard: Guard | None = None) -> Destination:
    """Make the destination that ``spec`` describes; connects to nothing yet.

    Loads what this kind of destination needs. Raises ``ConfigurationError``, and
    ``CirronDependencyError`` where something is not installed.
    """
    options = spec.options
    if spec.kind == "event_stream":
        from cirron_otel.destinations.event_stream import EventStream  # noqa: PLC0415

        return EventStream()
    if spec.kind == "platform":
        from cirron_otel.destinations.platform import Platform  # noqa: PLC0415 - loads urllib3

        return Platform(
            options["endpoint"],
            options["ingest_path"],
            key_reader(options["api_key"], options["api_key_source"]),
            output_dir=Path(options["output_dir"]),
            guard=guard,
        )
    if spec.kind == PROMETHEUS:
        from cirron_otel.destinations.prometheus import PrometheusEndpoint  # noqa: PLC0415 - extra
        from cirron_otel.destinations.prometheus_settings import PrometheusTarget  # noqa: PLC0415

        return PrometheusEndpoint(msgspec.convert(options, PrometheusTarget))
    from cirron_otel.destinations.otlp import OtlpDestination  # noqa: PLC0415 - loads much
    from cirron_otel.destinations.otlp_settings import OtlpTarget  # noqa: PLC0415 - as above

    return OtlpDestination(msgspec.convert(options, OtlpTarget))


def key_reader(key: str, source: str) -> Callable[[], str | None]:
    """A function that reads the API key again from where it came from.

    Where that is the environment or a file, a changed key is found without a restart; a key that
    was given as an argument stays. The function never raises.
    """

    def read() -> str | None:
        try:
            return _read_again(source) or key
        except (CirronError, OSError):
            return key

    return read


def _read_again(source: str) -> str | None:
    found: object = None
    if source == KEY_VARIABLE:
        found = os.environ.get(KEY_VARIABLE)
    elif source.endswith(".toml"):
        found = read_user_file(Path(source).parent.parent)[1].get("api_key")
    elif Path(source).is_absolute():
        found = read_project_file(Path(source)).get("api_key")
    return found.strip() if isinstance(found, str) and found.strip() else None
