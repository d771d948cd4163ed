"""Whether metrics are wanted at a port for Prometheus, and at which: OpenTelemetry's variables."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from cirron_otel.destinations.otlp_settings import METRICS, exporters_of
from cirron_otel.destinations.otlp_signals import exemplars_wanted
from cirron_otel.destinations.otlp_values import variable
from cirron_otel.errors import CirronDependencyError, ConfigurationError
from cirron_otel.imports import is_importable

PROMETHEUS = "prometheus"
_HOST, _PORT = "OTEL_EXPORTER_PROMETHEUS_HOST", "OTEL_EXPORTER_PROMETHEUS_PORT"
_DEFAULT_HOST, _DEFAULT_PORT = "localhost", 9464
_MAX_PORT = 65535


class PrometheusTarget(msgspec.Struct, frozen=True):
    """A port to scrape. With ``only_host`` it shows what that host records, and nothing else.

    ``ranks`` is the setting of that name.
    """

    host: str = _DEFAULT_HOST
    port: int = _DEFAULT_PORT
    only_host: str = ""
    ranks: str = "all"
    exemplars: bool = True

    @property
    def cursor_name(self) -> str:
        """A stable name, safe as a file name: one for each host that shows its own."""
        if not self.only_host:
            return PROMETHEUS
        return f"{PROMETHEUS}-{hashlib.sha256(self.only_host.encode()).hexdigest()[:8]}"

    @property
    def url(self) -> str:
        """Where to scrape it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"


def prometheus_target(environ: Mapping[str, str], only_host: str = "") -> PrometheusTarget | None:
    """The port that ``OTEL_METRICS_EXPORTER=prometheus`` asks for; None where it does not.

    Raises ``ConfigurationError``, and ``CirronDependencyError`` where prometheus-client is missing.
    """
    if (
        PROMETHEUS not in exporters_of(environ, METRICS)
        or variable(environ, "OTEL_SDK_DISABLED").lower() == "true"
    ):
        return None
    if not is_importable("prometheus_client"):
        raise CirronDependencyError(
            "OTEL_METRICS_EXPORTER asks for prometheus, which needs "
            "`pip install 'cirron-otel[prometheus]'`"
        )
    text = variable(environ, _PORT)
    port = int(text) if text.isdecimal() else -1 if text else _DEFAULT_PORT
    if not 0 <= port <= _MAX_PORT:
        raise ConfigurationError(f"{_PORT} = {text[:80]!r} must be a port, from 0 to {_MAX_PORT}")
    return PrometheusTarget(
        host=variable(environ, _HOST) or _DEFAULT_HOST,
        port=port,
        only_host=only_host,
        exemplars=exemplars_wanted(environ),
    )
