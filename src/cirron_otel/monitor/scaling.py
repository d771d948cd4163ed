"""The gradient scaler in use: whether it is on, its scale, whether gradients bear it."""

from __future__ import annotations

from typing import Any

import torch

from cirron_otel.errors import ConfigurationError


class Scaling:
    """What a ``GradScaler`` says of one optimizer; without a scaler, that there is none.

    Raises :class:`~cirron_otel.errors.ConfigurationError` for a scaler without an optimizer, and
    ``TypeError`` for what is no scaler.
    """

    def __init__(self, scaler: object, optimizer: object) -> None:
        if scaler is not None and optimizer is None:
            raise ConfigurationError("Monitor(scaler=...) needs the optimizer that it scales for")
        if scaler is not None and not all(
            callable(getattr(scaler, name, None)) for name in ("is_enabled", "get_scale")
        ):
            raise TypeError(
                f"Monitor(scaler=...): {type(scaler).__name__} is no GradScaler: it lacks "
                "is_enabled() or get_scale()"
            )
        self.scaler: Any = scaler
        self._optimizer = optimizer

    @property
    def given(self) -> bool:
        """Whether there is one."""
        return self.scaler is not None

    @property
    def enabled(self) -> bool:
        """Whether there is one and it is switched on."""
        return self.scaler is not None and bool(self.scaler.is_enabled())

    @property
    def is_on(self) -> bool:
        """Whether it is switched on and has scaled a loss by now."""
        return self.enabled and getattr(self.scaler, "_scale", self) is not None

    def scale(self) -> torch.Tensor | float | None:
        """Its scale, on its device where it is a tensor; None while it is not on."""
        if not self.is_on:
            return None
        scale = getattr(self.scaler, "_scale", None)
        return scale if isinstance(scale, torch.Tensor) else float(self.scaler.get_scale())

    def gradients_bear_it(self) -> bool:
        """Whether the gradients are still multiplied by the scale."""
        if not self.is_on:
            return False
        states = getattr(self.scaler, "_per_optimizer_states", {})
        state = states.get(id(self._optimizer))
        stage = None if state is None else state.get("stage")
        return getattr(stage, "name", "READY") == "READY"
