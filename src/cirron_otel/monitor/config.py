"""The monitor's settings: what each means, what it may be, and its default."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import msgspec

from cirron_otel.errors import ConfigurationError


class MonitorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """When the monitor checks and what it finds unusual. Frozen; :meth:`replace` gives another.

    Args:
        check_every: steps from one check to the next; steps count from 0, and 0 is checked.
        patience: consecutive checks after which a channel that never fires counts as silent, and
            a dead one is due for repair.
        sigma: standard deviations from the baseline beyond which a gradient or a loss is unusual.
        warmup: checks that only feed the baselines.
        baseline_rate_floor: least weight of a new value in a baseline.
        alarm_min_decades: powers of ten that a gradient norm must have moved at least.
        alarm_confirmations: consecutive checks that an alarm needs.
        loss_spike_factor: how many times its baseline a loss must be at least to be a spike.
        certified_repair_streak: consecutive checks after which a certified channel is repaired.
        decayed_rel_tol: a filter or scale smaller than this part of its layer's median is decayed.
        repair_seed: seed of repairs, with step and layer; None is 0. The program's random streams
            are not drawn from.
        certify_optimizers: names of further optimizers that move nothing without a gradient.
        list_limit: indices in an event about channels.
        channel_list_limit: indices in a certificate or repair.
        layer_list_limit: names in an event about layers.

    Raises :class:`~cirron_otel.errors.ConfigurationError` (a ``ValueError``) for a value that
    cannot be used.
    """

    check_every: int = 50
    patience: int = 4
    sigma: float = 2.5
    warmup: int = 8
    baseline_rate_floor: float = 0.1
    alarm_min_decades: float = 1.0
    alarm_confirmations: int = 2
    loss_spike_factor: float = 1.5
    certified_repair_streak: int = 2
    decayed_rel_tol: float = 1e-5
    repair_seed: int | None = None
    certify_optimizers: Sequence[str] = ()
    list_limit: int = 64
    channel_list_limit: int = 256
    layer_list_limit: int = 32

    def __post_init__(self) -> None:
        """Raise for what cannot be used."""
        for name, (is_right, right) in _RULES.items():
            value = getattr(self, name)
            if not is_right(value):
                raise ConfigurationError(
                    f"MonitorConfig: {name} = {value!r} cannot be used: it must be {right}"
                )

    def replace(self, **changes: Any) -> Self:
        """The same with some values changed, checked as ever. Raises as the constructor does."""
        unknown = changes.keys() - set(self.__struct_fields__)
        if unknown:
            raise ConfigurationError(
                f"MonitorConfig has no {', '.join(sorted(unknown))}; it has "
                f"{', '.join(self.__struct_fields__)}"
            )
        return type(self)(**{**msgspec.structs.asdict(self), **changes})

    def to_dict(self) -> dict[str, Any]:
        """All values in order, as ``run_start.config`` has them."""
        return {**msgspec.structs.asdict(self), "certify_optimizers": [*self.certify_optimizers]}


def _whole(low: int) -> tuple[Callable[[object], bool], str]:
    return (lambda value: type(value) is int and value >= low), f"a whole number, {low} or more"


def _number(is_right: Callable[[float], bool]) -> Callable[[object], bool]:
    def judge(value: object) -> bool:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and not math.isnan(value) and is_right(value)  # type: ignore[arg-type]

    return judge


def _is_names(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, (str, bytes))
        and all(isinstance(name, str) and name for name in value)
    )


_RULES: dict[str, tuple[Callable[[object], bool], str]] = {
    "check_every": _whole(1),
    "patience": _whole(1),
    "sigma": (_number(lambda value: value > 0), "a number above 0"),
    "warmup": _whole(0),
    "baseline_rate_floor": (_number(lambda v: 0 < v <= 1), "a number above 0 and at most 1"),
    "alarm_min_decades": (_number(lambda value: value >= 0), "a number, 0 or more"),
    "alarm_confirmations": _whole(1),
    "loss_spike_factor": (_number(lambda value: value >= 1), "a number, 1 or more"),
    "certified_repair_streak": _whole(1),
    "decayed_rel_tol": (_number(lambda value: 0 < value < 1), "a number between 0 and 1"),
    "repair_seed": (
        lambda value: value is None or (type(value) is int and value >= 0),
        "None or a whole number, 0 or more",
    ),
    "certify_optimizers": (_is_names, "a list of class names"),
    "list_limit": _whole(1),
    "channel_list_limit": _whole(1),
    "layer_list_limit": _whole(1),
}
