"""The patches of the torch hook, which other hooks make as well."""

from __future__ import annotations

from cirron_otel.hooks.patches import Patches

__all__ = ["Patches"]
