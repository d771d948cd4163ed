"""Findings: what a check has seen that a person should know, told everywhere at once.

A finding becomes a mark on the open scope (and so a span event), a log record with a severity, an
entry of ``ci.health()["findings"]``, one line in the log, and a call of every function given as
``profile(on_finding=...)``. Whoever finds something calls :func:`report`; what is done with it is
decided here.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from cirron_otel import semconv
from cirron_otel._guard import logger
from cirron_otel.batch import LogRecord
from cirron_otel.context import get_current
from cirron_otel.errors import ConfigurationError, StopTraining
from cirron_otel.scope_base import current_scope, set_place

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder

Severity = Literal["info", "warning", "critical"]
#: From the mildest on.
SEVERITIES: Final = ("info", "warning", "critical")
#: OpenTelemetry's severity number and text, and the level of the line in the log (Python's).
_SEVERITY = {"info": (9, "INFO", 20), "warning": (13, "WARN", 30), "critical": (17, "ERROR", 40)}
_KEPT = 100
#: Different kinds, and pairs of kind and layer, that are told apart; there are dozens at most.
_MAX_TOLD = 4096
_REST = "(others)"


class Finding(msgspec.Struct, frozen=True):
    """Something a person should know of.

    ``kind`` is a short name such as ``vanishing_gradient``; ``message`` one sentence that stands by
    itself; ``layer`` the module's name in the model; ``step`` the optimizer step, from 0, at which
    it was seen; ``attributes`` further facts, as attributes of the log record and the mark.
    """

    kind: str
    severity: Severity
    message: str
    layer: str | None = None
    step: int | None = None
    attributes: dict[str, Any] = msgspec.field(default_factory=dict)


OnFinding = Callable[[Finding], object]


class Outlet(ABC):
    """A function for ``on_finding=`` that sends findings on, from a thread of its own."""

    @abstractmethod
    def __call__(self, finding: Finding) -> None:
        """Take a finding in; never blocks."""

    @abstractmethod
    def hurry(self) -> None:
        """The end is near: send what waits now."""

    @abstractmethod
    def end(self, deadline: float) -> None:
        """Send what waits until ``deadline`` (of ``time.monotonic()``), and count the rest."""

    @abstractmethod
    def health(self) -> dict[str, Any]:
        """What ``ci.health()`` says of it."""


class Findings:
    """What was found in one process so far, and whom to tell. Any thread; no locks, no I/O."""

    def __init__(self) -> None:
        self.callbacks: tuple[OnFinding, ...] = ()
        #: Of all that were told, those that send findings on.
        self.outlets: list[Outlet] = []
        #: Severities and kinds at which the training is to be stopped.
        self.stop_on: frozenset[str] = frozenset()
        self.recent: deque[Finding] = deque(maxlen=_KEPT)
        self.by_kind: Counter[str] = Counter()
        self.by_severity: Counter[str] = Counter()
        #: What stops the training, once asked for; raised at the next clean point.
        self.stop: StopTraining | None = None
        self._told: set[tuple[str, str | None]] = set()

    def note(self, finding: Finding) -> bool:
        """Count and keep it; says whether it is the first of its kind in its layer."""
        kind = finding.kind
        if kind not in self.by_kind and len(self.by_kind) >= _MAX_TOLD:
            kind = _REST
        self.by_kind[kind] += 1
        self.by_severity[finding.severity] += 1
        self.recent.append(finding)
        if self.stop is None and not self.stop_on.isdisjoint((finding.severity, finding.kind)):
            self.stop = StopTraining(finding.message)
        told = (finding.kind, finding.layer)
        if told in self._told or len(self._told) >= _MAX_TOLD:
            return False
        self._told.add(told)
        return True

    def take_stop(self) -> StopTraining | None:
        """What was raised in order to stop the training, once."""
        stop, self.stop = self.stop, None
        return stop

    def stop_if_asked(self, _optimizer: object = None) -> None:
        """Raise what stops the training, once; called where no harm is done by it."""
        stop = self.take_stop()
        if stop is not None:
            raise stop

    def health(self) -> dict[str, Any]:
        """``health()["findings"]``: how many of what, and the newest hundred, oldest first."""
        return {
            "count": sum(self.by_severity.values()),
            "by_severity": {name: self.by_severity[name] for name in SEVERITIES},
            "by_kind": dict(self.by_kind),
            "recent": [_shown(finding) for finding in self.recent.copy()],
            "webhooks": [outlet.health() for outlet in self._outlets()],
        }

    def _outlets(self) -> list[Outlet]:
        given = [one for one in self.callbacks if isinstance(one, Outlet)]
        return [*given, *(one for one in self.outlets.copy() if one not in given)]

    def end_outlets(self, seconds: float) -> Callable[[], None]:
        """Have all that waits sent within so many seconds; what is returned waits for that."""
        deadline = time.monotonic() + seconds
        outlets = self._outlets()
        for outlet in outlets:
            outlet.hurry()

        def wait() -> None:
            for outlet in outlets:
                outlet.end(deadline)

        return wait

    def forget(self) -> None:
        """Begin anew: in a forked child what was found is the parent's."""
        self.recent.clear()
        self.by_kind.clear()
        self.by_severity.clear()
        self._told.clear()
        self.stop = None
        self.outlets.clear()


def _shown(finding: Finding) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.structs.asdict(finding)
    return {key: value for key, value in shown.items() if value is not None and value != {}}


def callbacks_of(given: object) -> tuple[OnFinding, ...]:
    """``on_finding=`` as a tuple: a function, several of them, or None for none.

    Raises :class:`~cirron_otel.errors.ConfigurationError` for anything else.
    """
    if given is None:
        return ()
    several = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(map(callable, several)):
        raise ConfigurationError(
            f"on_finding = {given!r} cannot be used: it must be a function that takes one Finding, "
            "or a list of such functions"
        )
    return several


def report(rec: Recorder | None, finding: Finding, *, to_log: bool = True) -> None:
    """Tell everybody of a finding. Any thread; never raises, no I/O but the line in the log.

    Without a recording (``rec`` is None) there is the line in the log and nothing else.
    """
    if rec is None:
        if to_log:
            log(finding)
        return
    try:
        is_new = rec.findings.note(finding)
        if rec.active:
            attributes = _attributes(finding)
            rec.mark(semconv.FINDING, finding.message, "point", attributes)
            _append_log(rec, finding, attributes)
        if is_new and to_log:
            log(finding)
    except Exception as error:  # noqa: BLE001 - see _guard
        rec.guard.swallow("findings", error)
    call_back(rec.findings, finding, rec.findings.callbacks)


def log(finding: Finding) -> None:
    """The line in the log of logger ``cirron_otel``, with which a terminal shows it."""
    level = _SEVERITY.get(finding.severity, _SEVERITY["warning"])[2]
    logger.log(level, "cirron-otel: %s", sentence(finding))


def sentence(finding: Finding) -> str:
    """A finding in one line for people."""
    where = "" if finding.step is None else f" (step {finding.step})"
    return f"{finding.severity}: {finding.message}{where}"


def call_back(findings: Findings, finding: Finding, callbacks: Iterable[OnFinding]) -> None:
    """Call functions of the user's; what they raise is logged, but for ``StopTraining``.

    That is kept for the next clean point.
    """
    for callback in callbacks:
        try:
            callback(finding)
        except StopTraining as stop:
            findings.stop = stop
        except Exception as error:  # noqa: BLE001 - the program goes on
            logger.warning(
                "cirron-otel: on_finding function %s raised %s for %r; the others were told",
                safe_repr(callback), safe_repr(error), finding.kind, exc_info=error,
            )  # fmt: skip


def safe_repr(thing: object) -> str:
    """Its repr, or the name of its class where a user's repr raises."""
    try:
        return repr(thing)
    except Exception:  # noqa: BLE001 - a user's
        return f"<{type(thing).__name__}>"


def _attributes(finding: Finding) -> dict[str, Any]:
    own: Mapping[str, Any] = finding.attributes
    found: dict[str, Any] = {
        **own,
        semconv.FINDING_KIND: finding.kind,
        semconv.FINDING_SEVERITY: finding.severity,
    }
    if finding.layer is not None:
        found[semconv.FINDING_LAYER] = finding.layer
    if finding.step is not None:
        found[semconv.FINDING_STEP] = finding.step
    return found


def _append_log(rec: Recorder, finding: Finding, attributes: dict[str, Any]) -> None:
    number, text, _ = _SEVERITY.get(finding.severity, _SEVERITY["warning"])
    row = LogRecord(
        rec.clock.now(), number, text, semconv.FINDING, finding.message, dict(attributes)
    )
    set_place(row, current_scope(rec, get_current()))
    rec.ensure_started()
    rec.batcher.append_log(row)
