"""Which signals go to which OTLP receiver: traces, and beside them metrics and logs.

For metrics and logs everything is read as it is for traces: ``OTEL_EXPORTER_OTLP_METRICS_*`` and
``OTEL_EXPORTER_OTLP_LOGS_*`` before the general variables; ``OTEL_METRICS_EXPORTER`` and
``OTEL_LOGS_EXPORTER`` without ``otlp`` switch them off. A receiver named by the call gets them at
the paths beside that of its traces.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cirron_otel._guard import logger
from cirron_otel.destinations.otlp_settings import (
    LOGS,
    METRICS,
    TRACES,
    Endpoint,
    MetricsEndpoint,
    OtlpTarget,
    Signal,
    asked_for,
    exporters_of,
    from_environment,
    named_apart,
    otlp_targets,
)
from cirron_otel.destinations.otlp_values import GRPC, PREFIX, headers_of, variable
from cirron_otel.errors import ConfigurationError

_SIGNALS = {"traces": TRACES, "metrics": METRICS, "logs": LOGS}
_INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
_TEMPORALITY = f"{PREFIX}METRICS_TEMPORALITY_PREFERENCE"
_AGGREGATION = f"{PREFIX}METRICS_DEFAULT_HISTOGRAM_AGGREGATION"
_EXPLICIT, _EXPONENTIAL = "explicit_bucket_histogram", "base2_exponential_bucket_histogram"


def otlp_receivers(
    otlp: object = None,
    headers: object = None,
    environ: Mapping[str, str] = os.environ,
    *,
    joined: bool = False,
    **budget: Any,
) -> list[OtlpTarget]:
    """As :func:`~cirron_otel.destinations.otlp_settings.otlp_targets`, with metrics and logs.

    Where the environment asks for metrics or logs but not for traces, or ``joined`` says that the
    application sends the traces, the receiver has no traces. Raises as that function does.
    """
    if otlp is None or otlp is True:
        return _from_environment(otlp, headers, environ, joined=joined, **budget)
    found: list[OtlpTarget] = []
    several = otlp if isinstance(otlp, Sequence) and not isinstance(otlp, str) else [otlp]
    for one in several:
        targets = otlp_targets(one, headers, environ, joined=joined, **budget)
        found += [_with_signals(target, one, environ) for target in targets]
    return named_apart(found)


def _from_environment(
    otlp: object, headers: object, environ: Mapping[str, str], *, joined: bool, **budget: Any
) -> list[OtlpTarget]:
    if variable(environ, "OTEL_SDK_DISABLED").lower() == "true":
        return []
    given = headers_of(headers, "profile(headers=)") if headers is not None else {}
    found = otlp_targets(otlp, headers, environ, joined=joined, **budget)
    beside: dict[str, Any] = {}
    for signal in (METRICS, LOGS):
        if asked_for(environ, signal) or (otlp is True and _goes_by_default(environ, signal)):
            target = from_environment(environ, given, signal)
            beside[signal.word.lower()] = _endpoint(target, signal, environ)
    if not beside:
        return found
    if not found:
        # The receiver keeps its name, so what it has is known when its traces are asked for.
        (target,) = otlp_targets(True, headers, environ, **budget)  # noqa: FBT003 - its value
        return [msgspec.structs.replace(target, traces=False, **beside)]
    return [msgspec.structs.replace(target, **beside) for target in found]


def _goes_by_default(environ: Mapping[str, str], signal: Signal) -> bool:
    """Whether a signal goes where nothing is said of it: not to a receiver named for traces."""
    exporters = exporters_of(environ, signal)
    return not exporters and not variable(environ, f"{PREFIX}{TRACES.word}_ENDPOINT")


def _with_signals(target: OtlpTarget, one: object, environ: Mapping[str, str]) -> OtlpTarget:
    """A receiver that the call names, with the signals that it takes."""
    said: Mapping[str, Any] = one if isinstance(one, Mapping) else {}
    wanted = _wanted(said)
    changes: dict[str, Any] = {"traces": "traces" in wanted}
    for name, signal in (("metrics", METRICS), ("logs", LOGS)):
        exporters = exporters_of(environ, signal)
        url = said.get(f"{name}_endpoint")
        if url is not None and not isinstance(url, str):
            raise ConfigurationError(
                f"profile(otlp=): '{name}_endpoint' must be a URL, not {url!r:.80}"
            )
        if name not in wanted or (exporters and "otlp" not in exporters):
            continue
        if url:
            (whole,) = otlp_targets(
                {"traces_endpoint": url, "protocol": target.protocol}, environ=environ
            )
            changes[name] = _endpoint(
                msgspec.structs.replace(target, url=whole.url), signal, environ
            )
        elif target.protocol == GRPC:
            changes[name] = _endpoint(target, signal, environ)
        else:
            base, query = target.url.partition("?")[::2]
            if base.endswith(TRACES.path):
                beside = base.removesuffix(TRACES.path) + signal.path + (f"?{query}" * bool(query))
                changes[name] = _endpoint(
                    msgspec.structs.replace(target, url=beside), signal, environ
                )
    return msgspec.structs.replace(target, **changes)


def _wanted(said: Mapping[str, Any]) -> set[str]:
    signals = said.get("signals")
    if signals is None:
        return set(_SIGNALS)
    names = [signals] if isinstance(signals, str) else signals
    if not isinstance(names, Sequence) or not names or not set(map(str, names)) <= set(_SIGNALS):
        raise ConfigurationError(
            f"profile(otlp=): 'signals' must be of {', '.join(_SIGNALS)}, not {signals!r:.80}"
        )
    return set(map(str, names))


def _endpoint(target: OtlpTarget, signal: Signal, environ: Mapping[str, str]) -> Endpoint:
    shared = {name: getattr(target, name) for name in Endpoint.__struct_fields__}
    if signal is not METRICS:
        return Endpoint(**shared)
    preference = variable(environ, _TEMPORALITY).lower()
    if preference not in {"", "cumulative"}:
        logger.warning(
            "cirron-otel: %s=%s is not followed: metrics are cumulative, because only then does a "
            "batch that is sent twice count once",
            _TEMPORALITY, preference[:40],
        )  # fmt: skip
    return MetricsEndpoint(
        **shared,
        interval=_interval(environ),
        exemplars=exemplars_wanted(environ),
        exponential=_is_exponential(environ),
    )


def exemplars_wanted(environ: Mapping[str, str]) -> bool:
    """Whether metrics name spans as examples."""
    return variable(environ, "OTEL_METRICS_EXEMPLAR_FILTER").lower() != "always_off"


def _is_exponential(environ: Mapping[str, str]) -> bool:
    text = variable(environ, _AGGREGATION).lower()
    if text not in {"", _EXPLICIT, _EXPONENTIAL}:
        raise ConfigurationError(
            f"{_AGGREGATION} = {text[:80]!r} must be {_EXPLICIT} or {_EXPONENTIAL}"
        )
    return text == _EXPONENTIAL


def _interval(environ: Mapping[str, str]) -> float:
    """``OTEL_METRIC_EXPORT_INTERVAL`` in seconds; 0 where it is not set: with every batch."""
    text = variable(environ, _INTERVAL)
    if not text:
        return 0.0
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = -1.0
    if not 0 <= milliseconds < float("inf"):
        raise ConfigurationError(f"{_INTERVAL} = {text[:80]!r} must be a number of milliseconds")
    return milliseconds / 1000
