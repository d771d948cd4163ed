"""What one value of the OTLP settings may be: text from the environment, or what a call gave.

Each raises ``ConfigurationError`` that names where the value came from and never shows a header's
value. Pure functions but for a look at what is installed.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping
from urllib.parse import unquote

from cirron_otel.errors import CirronDependencyError, ConfigurationError
from cirron_otel.imports import is_importable

logger = logging.getLogger("cirron_otel")

GRPC, PROTOBUF, JSON = "grpc", "http/protobuf", "http/json"
PROTOCOLS = (PROTOBUF, JSON, GRPC)
COMPRESSIONS = ("none", "gzip", "deflate")

PREFIX = "OTEL_EXPORTER_OTLP_"
#: Nobody waits a quarter of an hour for one request: such a number is in milliseconds.
_MILLISECONDS_FROM = 1000
_LEAST_BYTES = 1024
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,40}")


def path_of(value: object, source: str) -> str | None:
    """The path of a PEM file; None for none."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    raise ConfigurationError(
        f"{source}: a certificate must be the path of a PEM file, not {value!r:.80}"
    )


def variable(environ: Mapping[str, str], name: str) -> str:
    """A variable's text; an empty one is as good as none."""
    return environ.get(name, "").strip()


def signal_variable(
    environ: Mapping[str, str], what: str, signal: str = "TRACES"
) -> tuple[str, str]:
    """The signal's own variable or else the general one: its text and its name."""
    for name in (f"{PREFIX}{signal}_{what}", f"{PREFIX}{what}"):
        if text := variable(environ, name):
            return text, name
    return "", f"{PREFIX}{what}"


def protocol_of(
    environ: Mapping[str, str], chosen: object = None, source: str = "", signal: str = "TRACES"
) -> str:
    """The protocol chosen, or the environment's; by default one whose library is there."""
    if chosen is None:
        chosen, source = signal_variable(environ, "PROTOCOL", signal)
    if not chosen:
        if is_importable("opentelemetry.proto.trace"):
            return PROTOBUF
        logger.info(
            "cirron-otel: OTLP goes out as http/json, because opentelemetry-proto is not "
            "installed; `pip install 'cirron-otel[otlp]'` brings http/protobuf"
        )
        return JSON
    protocol = str(chosen).strip().lower()
    if protocol not in PROTOCOLS:
        raise ConfigurationError(
            f"{source} = {str(chosen)[:80]!r} is no OTLP protocol; it must be one of "
            f"{', '.join(PROTOCOLS)}"
        )
    needed = {
        PROTOBUF: (("opentelemetry.proto.trace",), "otlp"),
        GRPC: (("opentelemetry.proto.trace", "grpc", "google.rpc"), "otlp-grpc"),
        JSON: ((), ""),
    }
    modules, extra = needed[protocol]
    if not all(map(is_importable, modules)):
        raise CirronDependencyError(
            f"{source} asks for {protocol}, which needs `pip install 'cirron-otel[{extra}]'`; "
            "http/json needs nothing"
        )
    return protocol


def timeout_of(text: str, source: str) -> float:
    """Seconds, as OpenTelemetry for Python reads it; its specification has milliseconds."""
    seconds = seconds_of(text, source)
    if seconds >= _MILLISECONDS_FROM:
        logger.warning("cirron-otel: %s=%s is taken for milliseconds", source, text)
        seconds /= 1000
    return seconds


def seconds_of(value: object, source: str) -> float:
    """A number of seconds above 0."""
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigurationError(f"{source} = {str(value)[:80]!r} must be a number of seconds > 0")
    return seconds


def compression_of(value: object, source: str) -> str:
    """How requests are compressed."""
    compression = str(value).strip().lower()
    if compression not in COMPRESSIONS:
        raise ConfigurationError(
            f"{source} = {str(value)[:80]!r} must be one of {', '.join(COMPRESSIONS)}"
        )
    return compression


def bytes_of(value: object, source: str) -> int:
    """The size of the largest request."""
    if isinstance(value, bool) or not isinstance(value, int) or value < _LEAST_BYTES:
        raise ConfigurationError(
            f"{source} max_request_bytes = {value!r:.80} must be a number of bytes, "
            f"{_LEAST_BYTES} or more"
        )
    return value


def name_of(value: object, source: str) -> str:
    """A name that may be part of a file's."""
    name = str(value)
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{source} name = {name[:80]!r} must be up to 41 of a-z, 0-9, '_', '.', '-'"
        )
    return name


def headers_of(value: object, source: str) -> dict[str, str]:
    """Headers of a mapping, or of text ``a=1,b=2`` with URL-encoded values; names lower-case."""
    if isinstance(value, Mapping):
        pairs = [(str(name), str(text)) for name, text in value.items()]
    elif isinstance(value, str):
        pairs = []
        for entry in filter(None, (part.strip() for part in value.split(","))):
            name, equals, text = entry.partition("=")
            if not equals:
                raise ConfigurationError(
                    f"{source} holds an entry without '='; it must be name=value,name=value with "
                    "the values URL-encoded"
                )
            pairs.append((unquote(name), unquote(text)))
    else:
        raise ConfigurationError(
            f"{source} must be a mapping or text such as 'name=value', not {type(value).__name__}"
        )
    headers = {}
    for raw_name, raw_text in pairs:
        name, text = raw_name.strip().lower(), raw_text.strip()
        if not _HEADER_NAME.fullmatch(name):
            raise ConfigurationError(f"{source} names a header {name[:40]!r}, which HTTP forbids")
        if not text.isascii() or not text.isprintable():
            raise ConfigurationError(
                f"{source}: the value of {name!r} has characters that HTTP forbids in a header"
            )
        headers[name] = text
    return headers
