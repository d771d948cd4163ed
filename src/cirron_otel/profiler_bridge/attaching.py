"""What the settings of a recording ask of the bridge."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from cirron_otel.errors import CirronDependencyError
from cirron_otel.hooks import is_installed
from cirron_otel.profiler_bridge.ranges import Mirror
from cirron_otel.profiler_bridge.windows import ProfileWindow

if TYPE_CHECKING:
    from cirron_otel.findings import Finding
    from cirron_otel.recorder import Recorder
    from cirron_otel.settings import Settings

#: Of a window that a finding begins, and how many such windows a process records.
STEPS_AFTER_FINDING = 3
MOST_AFTER_FINDINGS = 5


def check(settings: Settings) -> None:
    """Raise :class:`CirronDependencyError` for settings that need a torch that is not there."""
    for name in ("mirror", "profile_on"):
        if getattr(settings, name) and not is_installed("torch"):
            raise CirronDependencyError(
                f"profile({name}=...) needs torch, which is not installed: pip install torch"
            )


def attach(rec: Recorder) -> None:
    """Mirror the scopes of ``rec`` and begin windows after findings, as its settings say."""
    if rec.settings.mirror is not None:
        rec.listen(Mirror(rec, rec.settings.mirror))
    if rec.settings.profile_on:
        begins = functools.partial(_after_finding, rec, frozenset(rec.settings.profile_on), set())
        rec.findings.callbacks = (*rec.findings.callbacks, begins)


def _after_finding(rec: Recorder, wanted: frozenset[str], had: set[str], finding: Finding) -> None:
    """Begin a window after a finding that is wanted, the first of its kind."""
    if wanted.isdisjoint((finding.severity, finding.kind)) or finding.kind in had:
        return
    busy = any(isinstance(one, ProfileWindow) for one in rec.listening.scopes)
    if not busy and len(had) < MOST_AFTER_FINDINGS and rec.active:
        had.add(finding.kind)
        rec.listen(ProfileWindow(rec, STEPS_AFTER_FINDING, {}))
