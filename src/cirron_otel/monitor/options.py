"""``profile(monitor=...)``: a switch, or the monitor's options in one mapping, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cirron_otel.errors import ConfigurationError
from cirron_otel.monitor.config import MonitorConfig

#: Arguments of ``Monitor`` that make sense where the hooks make it.
_ARGUMENTS = ("out", "name", "layers", "overwrite", "append", "verbose", "repair", "reduce_norms")


def arguments_of(monitor: Mapping[str, object] | bool) -> dict[str, Any] | None:  # noqa: FBT001 - a setting
    """The arguments of ``Monitor`` that a setting stands for; None where nothing is monitored.

    A mapping has fields of ``MonitorConfig`` and some arguments of ``Monitor``. Raises
    :class:`~cirron_otel.errors.ConfigurationError` for anything else in it.
    """
    if monitor is False:
        return None
    given: dict[str, Any] = {} if monitor is True else dict(monitor)
    fields = set(MonitorConfig.__struct_fields__)
    unknown = given.keys() - fields - set(_ARGUMENTS)
    if unknown:
        known = ", ".join((*MonitorConfig.__struct_fields__, *_ARGUMENTS))
        raise ConfigurationError(
            f"monitor = has no option {', '.join(sorted(map(repr, unknown)))}; it has {known}"
        )
    config = {key: value for key, value in given.items() if key in fields}
    try:
        made = MonitorConfig(**config)
    except msgspec.ValidationError as exc:
        raise ConfigurationError(f"monitor: {exc}") from None
    return {
        "config": made,
        **{key: value for key, value in given.items() if key in _ARGUMENTS},
    }
