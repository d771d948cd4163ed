"""Where OTLP goes: ``profile(otlp=...)`` and OpenTelemetry's own environment variables.

Everything is read once, when a recording starts; what cannot be used is a ``ConfigurationError``
that names the variable or the argument, and never shows a header's value.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

from cirron_otel.destinations.otlp_values import (
    GRPC,
    PREFIX,
    PROTOBUF,
    bytes_of,
    compression_of,
    headers_of,
    name_of,
    path_of,
    protocol_of,
    seconds_of,
    signal_variable,
    timeout_of,
    variable,
)
from cirron_otel.destinations.tls import Tls
from cirron_otel.errors import ConfigurationError


class Signal(NamedTuple):
    """One of OpenTelemetry's signals: its word in variables, and its path."""

    word: str
    path: str


TRACES = Signal("TRACES", "/v1/traces")
METRICS = Signal("METRICS", "/v1/metrics")
LOGS = Signal("LOGS", "/v1/logs")

DEFAULT_HTTP = "http://localhost:4318"
DEFAULT_GRPC = "http://localhost:4317"
DEFAULT_TIMEOUT = 10.0
#: Below the 4 MiB that gRPC receivers take; no HTTP receiver takes less by default.
MAX_REQUEST_BYTES = 3_800_000

_GRPC_SCHEMES = {"grpc": "http", "grpcs": "https"}
_GRPC_PORT = 4317


class Endpoint(msgspec.Struct, frozen=True):
    """Where one signal goes, and how.

    ``url`` is the whole URL that requests go to, for gRPC ``http(s)://host:port``; its query may
    hold a key. ``timeout`` is in seconds, for one request.
    """

    url: str
    protocol: str = PROTOBUF
    headers: dict[str, str] = {}
    timeout: float = DEFAULT_TIMEOUT
    compression: str = "none"
    tls: Tls = Tls()

    @property
    def shown(self) -> str:
        """The URL for people: without what its query says."""
        url, query, _ = self.url.partition("?")
        return url + ("?***" if query else "")


class MetricsEndpoint(Endpoint, frozen=True):
    """Where metrics go; ``interval`` is the least time between two requests, in seconds.

    With ``exponential`` the buckets of histograms are exponential, in place of given ones.
    """

    interval: float = 0.0
    exemplars: bool = True
    exponential: bool = False


class OtlpTarget(Endpoint, frozen=True):
    """One receiver of OTLP: where its traces go, and what else goes with them.

    ``max_request_bytes`` bounds a request before compression. ``export_rate`` and
    ``export_burst`` are the budget of :mod:`cirron_otel.otlp.budget`; a rate of 0 is none.
    ``request_sample_ratio`` and ``tenant_rate`` are the limits of
    :mod:`cirron_otel.otlp.request_budget`.
    Without ``traces`` only the other signals go out. ``ranks`` is the setting of that name.
    """

    max_request_bytes: int = MAX_REQUEST_BYTES
    name: str = ""
    export_rate: float = 0.0
    export_burst: int = 0
    request_sample_ratio: float = 1.0
    tenant_rate: float = 0.0
    traces: bool = True
    ranks: str = "all"
    metrics: MetricsEndpoint | None = None
    logs: Endpoint | None = None

    @property
    def cursor_name(self) -> str:
        """A stable name, safe as a file name: the same for the same receiver in every run."""
        if self.name:
            return f"otlp-{self.name}"
        return f"otlp-{hashlib.sha256(self.url.encode()).hexdigest()[:8]}"

    @property
    def hint(self) -> str:
        """What to look at first when this receiver never answers well; empty for nothing odd."""
        if self.protocol != GRPC and urlsplit(self.url).port == _GRPC_PORT:
            return (
                f"port {_GRPC_PORT} usually speaks gRPC: set OTEL_EXPORTER_OTLP_PROTOCOL=grpc, "
                "or use port 4318"
            )
        return ""


def otlp_targets(  # noqa: PLR0913 - each has its own name
    otlp: object = None,
    headers: object = None,
    environ: Mapping[str, str] = os.environ,
    *,
    joined: bool = False,
    export_rate: float = 0.0,
    export_burst: int = 0,
) -> list[OtlpTarget]:
    """Every OTLP receiver of traces that the call or the environment names, none of them twice.

    ``otlp`` is what ``profile(otlp=)`` got: a URL, a mapping, a list of these, ``True`` for what
    the environment says or else OpenTelemetry's default, ``False`` for none, ``None`` for what
    the environment asks for by itself. ``headers`` belong to every URL given so. ``joined``: the
    application exports by its own provider, so the environment alone asks for nothing.
    ``export_rate`` and ``export_burst`` hold for each receiver.

    Raises ``ConfigurationError`` and, where a protocol was chosen whose library is missing,
    ``CirronDependencyError``.
    """
    if variable(environ, "OTEL_SDK_DISABLED").lower() == "true" or otlp is False:
        return []
    given = headers_of(headers, "profile(headers=)") if headers is not None else {}
    if otlp is None or otlp is True:
        if otlp is None and (joined or not asked_for(environ)):
            return []
        found = [from_environment(environ, given)]
        return [_with_budget(target, export_rate, export_burst) for target in found]
    several = otlp if isinstance(otlp, Sequence) and not isinstance(otlp, str) else [otlp]
    found = [_from_argument(one, given, environ) for one in several]
    return [_with_budget(target, export_rate, export_burst) for target in named_apart(found)]


def _with_budget(target: OtlpTarget, rate: float, burst: int) -> OtlpTarget:
    return msgspec.structs.replace(target, export_rate=rate, export_burst=burst)


def asked_for(environ: Mapping[str, str], signal: Signal = TRACES) -> bool:
    """Whether the environment alone asks for this signal by OTLP."""
    exporters = exporters_of(environ, signal)
    if exporters:
        return "otlp" in exporters
    return bool(signal_variable(environ, "ENDPOINT", signal.word)[0])


def exporters_of(environ: Mapping[str, str], signal: Signal) -> list[str]:
    """What ``OTEL_<SIGNAL>_EXPORTER`` lists; empty where it is not set."""
    text = variable(environ, f"OTEL_{signal.word}_EXPORTER")
    return [name for one in text.split(",") if (name := one.strip().lower())]


def from_environment(
    environ: Mapping[str, str], given: dict[str, str], signal: Signal = TRACES
) -> OtlpTarget:
    """Where the environment sends a signal, or else OpenTelemetry's default."""
    word = signal.word
    protocol = protocol_of(environ, signal=word)
    url, source = signal_variable(environ, "ENDPOINT", word)
    is_base = source == f"{PREFIX}ENDPOINT"
    if not url:
        url = DEFAULT_GRPC if protocol == GRPC else DEFAULT_HTTP
        source = "OpenTelemetry's default"
    return _target(
        {**_shared(environ, word), "protocol": protocol},
        url,
        source,
        headers={**_environment_headers(environ, word), **given},
        path=signal.path if is_base else "",
        insecure=signal_variable(environ, "INSECURE", word)[0].lower() == "true",
    )


_KEYS = {
    "endpoint", "traces_endpoint", "headers", "protocol", "timeout", "compression", "certificate",
    "client_certificate", "client_key", "insecure", "max_request_bytes", "name", "signals",
    "metrics_endpoint", "logs_endpoint",
}  # fmt: skip


def _from_argument(one: object, given: dict[str, str], environ: Mapping[str, str]) -> OtlpTarget:
    source = "profile(otlp=)"
    said = _said(one, source)
    url = said.get("traces_endpoint") or said.get("endpoint")
    if not isinstance(url, str) or not url.strip():
        raise ConfigurationError(f"{source}: 'endpoint' must be a URL, not {url!r:.80}")
    url = url.strip()
    scheme, separator, rest = url.partition("://")
    chosen = said.get("protocol")
    if scheme.lower() in _GRPC_SCHEMES:
        url = f"{_GRPC_SCHEMES[scheme.lower()]}{separator}{rest}"
        chosen = GRPC
    headers = dict(given)
    if "headers" in said:
        headers.update(headers_of(said["headers"], f"{source} headers"))
    if not headers and _headers_are_for(url, environ):
        headers = _environment_headers(environ)
    return _target(
        {
            **_shared(environ),
            **_own(said, source, environ),
            "protocol": protocol_of(environ, chosen, source),
        },
        url,
        source,
        headers=headers,
        path="" if "traces_endpoint" in said else TRACES.path,
        insecure=said.get("insecure") is True,
    )


def _said(one: object, source: str) -> dict[str, Any]:
    """One element of ``otlp=`` as a dict with known keys."""
    if isinstance(one, str):
        return {"endpoint": one}
    if not isinstance(one, Mapping):
        raise ConfigurationError(
            f"{source} takes a URL such as 'http://collector:4318', a mapping with 'endpoint', "
            f"or a list of these, not {type(one).__name__}"
        )
    said = {str(key): value for key, value in one.items() if value is not None}
    if unknown := sorted(set(said) - _KEYS):
        raise ConfigurationError(
            f"{source} does not know {', '.join(map(repr, unknown))}; known are "
            f"{', '.join(sorted(_KEYS))}"
        )
    return said


def _own(said: Mapping[str, Any], source: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """What a target says for itself, over what holds for all."""
    own: dict[str, Any] = {}
    if "timeout" in said:
        own["timeout"] = seconds_of(said["timeout"], f"{source} timeout")
    if "compression" in said:
        own["compression"] = compression_of(said["compression"], f"{source} compression")
    if "max_request_bytes" in said:
        own["max_request_bytes"] = bytes_of(said["max_request_bytes"], source)
    if "name" in said:
        own["name"] = name_of(said["name"], source)
    shared: Tls = _shared(environ)["tls"]
    own["tls"] = Tls(
        ca=path_of(said.get("certificate", shared.ca), source),
        client_certificate=path_of(
            said.get("client_certificate", shared.client_certificate), source
        ),
        client_key=path_of(said.get("client_key", shared.client_key), source),
    )
    return own


def _headers_are_for(url: str, environ: Mapping[str, str]) -> bool:
    """Whether the environment's headers may go to this URL: they may hold somebody's key."""
    named = signal_variable(environ, "ENDPOINT")[0]
    return not named or _host(named) == _host(url)


def _host(url: str) -> str | None:
    try:
        return urlsplit(url if "://" in url else f"//{url}").hostname
    except ValueError:
        return None


def _shared(environ: Mapping[str, str], word: str = TRACES.word) -> dict[str, Any]:
    """What holds for every target unless it says otherwise."""
    timeout, timeout_name = signal_variable(environ, "TIMEOUT", word)
    compression, compression_name = signal_variable(environ, "COMPRESSION", word)
    return {
        "timeout": timeout_of(timeout, timeout_name) if timeout else DEFAULT_TIMEOUT,
        "compression": compression_of(compression or "none", compression_name),
        "tls": Tls(
            ca=signal_variable(environ, "CERTIFICATE", word)[0] or None,
            client_certificate=signal_variable(environ, "CLIENT_CERTIFICATE", word)[0] or None,
            client_key=signal_variable(environ, "CLIENT_KEY", word)[0] or None,
        ),
    }


def _environment_headers(environ: Mapping[str, str], word: str = TRACES.word) -> dict[str, str]:
    text, source = signal_variable(environ, "HEADERS", word)
    return headers_of(text, source) if text else {}


# --- the URL -----------------------------------------------------------------------------------


def _target(  # noqa: PLR0913 - what makes a target
    settings: dict[str, Any],
    url: str,
    source: str,
    *,
    headers: dict[str, str],
    path: str,
    insecure: bool,
) -> OtlpTarget:
    """``path`` belongs to a base URL; empty for one that is whole."""
    grpc = settings["protocol"] == GRPC
    if grpc and "://" not in url:
        url = f"{'http' if insecure else 'https'}://{url}"
    parts = _split(url, source)
    if parts.username is not None and "authorization" not in headers:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        basic = base64.b64encode(login.encode()).decode()
        headers = {**headers, "authorization": f"Basic {basic}"}
    place = parts.netloc.rpartition("@")[2]
    if grpc:
        default = "443" if parts.scheme == "https" else str(_GRPC_PORT)
        place = place if parts.port is not None else f"{place}:{default}"
        shown = f"{parts.scheme}://{place}"
    else:
        place_path = parts.path
        if path and not place_path.endswith(path):
            place_path = place_path.removesuffix(TRACES.path).rstrip("/") + path
        query = f"?{parts.query}" if parts.query else ""
        shown = f"{parts.scheme}://{place}{place_path or '/'}{query}"
    return OtlpTarget(url=shown, headers=headers, **settings)


def _split(url: str, source: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port_is_read = parts.port is None or parts.port >= 0
    except ValueError:
        parts, port_is_read = urlsplit(""), False
    if parts.scheme.lower() not in {"http", "https"} or not parts.hostname or not port_is_read:
        shown = re.sub(r"//[^/?#]*@", "//***@", url)[:120]
        raise ConfigurationError(
            f"{source} = {shown!r} is no endpoint for OTLP; it must be a URL such as "
            "'http://collector:4318', or 'grpc://collector:4317' in profile(otlp=)"
        )
    return parts


def named_apart(found: list[OtlpTarget]) -> list[OtlpTarget]:
    """Two targets at one URL (two tenants, say) need a cursor each, and so a name each."""
    out: list[OtlpTarget] = []
    names: set[str] = set()
    for target in found:
        if target in out:
            continue
        if target.cursor_name in names:
            raise ConfigurationError(
                f"profile(otlp=) names {target.shown} twice with different settings; give each a "
                "'name' of its own"
            )
        names.add(target.cursor_name)
        out.append(target)
    return out
