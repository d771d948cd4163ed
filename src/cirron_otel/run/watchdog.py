"""When a training stops moving: which phase, for how long, and what every thread stands in.

A scope that opens, ends or gets a mark is movement. How long none may come depends on what is going
on: a first step compiles, an evaluation is long, a checkpoint waits for a slow disk. Only the
thread that trains is looked at, from outside: nothing is asked of it.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from cirron_otel import semconv
from cirron_otel.errors import ConfigurationError
from cirron_otel.run.closing import clock

if TYPE_CHECKING:
    from types import FrameType

    from cirron_otel.scope_base import BaseScope

#: Seconds without movement, by what is going on. NCCL itself gives up after 600.
THRESHOLDS: Final[Mapping[str, float]] = {
    "step": 300.0,
    "data_load": 300.0,
    "first_step": 1800.0,
    "evaluation": 1800.0,
    "checkpoint": 3600.0,
    "epoch": 1800.0,
}
#: A step may be silent for this many times the longest silence there was in one.
_TIMES_LONGEST = 10.0
#: Of the time between two looks counts at most what looks are apart, and so much more.
_LATE_NS = 5_000_000_000
_STAGES = frozenset({semconv.EVALUATION, semconv.PREDICTION, semconv.SANITY_CHECK})
_MAX_STACKS = 16_000
_MAX_FRAMES = 40
_OUR_THREADS = "cirron-otel-"
#: Files in which a thread that fetches data stands: torch's loader, or ``ci.batches``.
_LOADERS = ("torch/utils/data/dataloader.py", "cirron_otel/scopes.py")
_COLLECTIVES = ("torch/distributed/",)


def thresholds_of(given: bool | float | Mapping[str, object]) -> dict[str, float]:  # noqa: FBT001 - a setting
    """``watchdog=`` as seconds by phase; empty where it is off.

    A number is that of ``step`` and ``data_load``, the others are at least as long. Raises
    :class:`~cirron_otel.errors.ConfigurationError` for a phase that is not known.
    """
    if given is False:
        return {}
    found = dict(THRESHOLDS)
    if given is True:
        return found
    if isinstance(given, Mapping):
        for name, value in given.items():
            if name not in THRESHOLDS or isinstance(value, bool):
                raise ConfigurationError(_wrong(given))
            try:
                found[name] = float(value)  # type: ignore[arg-type]
            except (TypeError, ValueError):
                raise ConfigurationError(_wrong(given)) from None
    else:
        found = {name: max(value, float(given)) for name, value in found.items()}
        found["step"] = found["data_load"] = float(given)
    if not all(value > 0 for value in found.values()):
        raise ConfigurationError(_wrong(given))
    return found


def _wrong(given: object) -> str:
    return (
        f"watchdog = {given!r} cannot be used: it must be true, false, a number of seconds above "
        f"0, or a mapping from {', '.join(THRESHOLDS)} to such numbers"
    )


class Silence(NamedTuple):
    """Nothing has moved since ``since_ns`` (ns since the Unix epoch), in ``phase``."""

    phase: str
    since_ns: int
    path: tuple[BaseScope, ...]

    def where(self) -> str:
        """The open scopes as text, outermost first."""
        return " > ".join(_named(scope) for scope in self.path) or "no scope"


class Watchdog:
    """Looks, when it is asked to, whether the training thread moves. One thread."""

    def __init__(
        self, thresholds: Mapping[str, float], *, interactive: bool, interval_s: float = 1.0
    ) -> None:
        self.thresholds = thresholds
        self._most_ns = round(2e9 * interval_s) + _LATE_NS
        #: When it looked last, on the monotonic clock; 0 before.
        self._looked_ns = 0
        # Between two cells of a notebook a step may stay open, and nothing moves: that is no hang.
        self.active = bool(thresholds) and not interactive
        #: The longest silence inside a step that ended by itself, and how long this one is so far.
        #: Added up from look to look: a clock that is set, and a process or machine that was
        #: stopped as a whole, are no silence of the training.
        self._longest_ns = self._length_ns = 0
        self._seen: tuple[str, int] | None = None
        #: When a scope was last touched by our own word on its silence.
        self._excused_ns = 0
        #: The silence that has been told.
        self.told: Silence | None = None

    def look(
        self,
        scopes: Iterable[BaseScope],
        thread_id: int,
        now_ns: int,
        *,
        steps: int,
        monotonic_ns: int,
    ) -> Silence | None:
        """The silence that has just become too long; None for all is well, or it was told.

        ``scopes`` are the open ones of the process, ``steps`` the training steps that have ended;
        ``now_ns`` is the wall clock's word for ``monotonic_ns``.
        """
        before_ns, self._looked_ns = self._looked_ns or monotonic_ns, monotonic_ns
        apart_ns = min(monotonic_ns - before_ns, self._most_ns)
        silence = silence_of(scopes, thread_id, steps=steps)
        if silence is None:
            self._is_over()
            return None
        if self.told is not None and silence.since_ns == self._excused_ns:
            silence = silence._replace(since_ns=self.told.since_ns)
        key = silence.phase, silence.since_ns
        if key != self._seen:
            self._is_over()
            self._seen = key
            # It began since the last look.
            self._length_ns = max(0, min(now_ns - silence.since_ns, apart_ns))
        else:
            self._length_ns += apart_ns
        limit_ns = self.thresholds.get(silence.phase, 0.0) * 1e9
        if silence.phase in {"step", "data_load"}:
            limit_ns = max(limit_ns, _TIMES_LONGEST * self._longest_ns)
        if self.told is None and limit_ns and self._length_ns > limit_ns:
            self.told = silence
            return silence
        return None

    @property
    def length_ns(self) -> int:
        """How long the silence is that was looked at last."""
        return self._length_ns

    def _is_over(self) -> None:
        """What was looked at until now has moved."""
        if self._seen is not None and self._seen[0] == "step" and self.told is None:
            self._longest_ns = max(self._longest_ns, self._length_ns)
        self._seen, self.told = None, None

    def excuse(self, silence: Silence) -> None:
        """What has just been told of a silence is a mark in it, and no movement."""
        self._excused_ns = silence.path[-1].last_ns


def silence_of(scopes: Iterable[BaseScope], thread_id: int, *, steps: int) -> Silence | None:
    """What the training thread is in, and since when nothing has moved there; None: no training."""
    here = sorted(
        (
            scope
            for scope in scopes
            if scope.thread_id == thread_id and scope.above is not None and scope.is_open
        ),
        key=lambda scope: scope.depth,
    )
    if not here:
        return None
    names = [scope.name for scope in here]
    since_ns = max(max(scope.start_ns, scope.last_ns) for scope in here)
    path = tuple(here)
    if semconv.CHECKPOINT in names:
        return Silence("checkpoint", since_ns, path)
    if not _STAGES.isdisjoint(names):
        return Silence("evaluation", since_ns, path)
    if semconv.STEP in names:
        is_warm = steps and not any(semconv.WARMUP in scope.attrs for scope in here)
        return Silence("step" if is_warm else "first_step", since_ns, path)
    epoch = here[names.index(semconv.EPOCH)] if semconv.EPOCH in names else None
    if epoch is not None and stands_in(thread_id, _LOADERS):
        return Silence("data_load" if steps else "first_step", since_ns, path)
    # An epoch of a loop that nobody gave a name may be over, and the program do something else.
    return None if epoch is None or epoch.auto else Silence("epoch", since_ns, path)


def stands_in(thread_id: int, parts: tuple[str, ...]) -> bool:
    """Whether a thread runs code of a file whose path has one of these parts."""
    frame: FrameType | None = sys._current_frames().get(thread_id)  # noqa: SLF001 - documented
    while frame is not None:
        path = frame.f_code.co_filename
        if any(part in path for part in parts):
            return True
        frame = frame.f_back
    return False


def waits_for_others(thread_id: int, path: tuple[BaseScope, ...]) -> bool:
    """Whether a rank that does not move stands where ranks wait for each other."""
    names = {scope.name for scope in path}
    in_backward = bool(names & {semconv.BACKWARD, semconv.COLLECTIVE_WAIT})
    return in_backward or stands_in(thread_id, _COLLECTIVES)


def stacks() -> str:
    """The Python stack of every thread but ours, the innermost call last; at most 16,000 chars."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)  # noqa: SLF001
    parts: list[str] = []
    for ident, frame in frames:
        name = names.get(ident, "unknown to Python")
        if name.startswith(_OUR_THREADS):
            continue
        lines = traceback.format_stack(frame, limit=None)[-_MAX_FRAMES:]
        parts.append(f"thread {name!r}:\n{''.join(lines)}")
    text = "\n".join(parts)
    return text if len(text) <= _MAX_STACKS else f"{text[:_MAX_STACKS]}\n(more was cut)"


def message(silence: Silence, now_ns: int, iteration: int, *, rank: int, ranks: str) -> str:
    """The hang in a sentence."""
    length = clock((now_ns - silence.since_ns) / 1e9)
    who = f"rank {rank}" if ranks else "the training"
    words = {"data_load": "waiting for data"}.get(silence.phase, silence.phase.replace("_", " "))
    said = (
        f"{who} has not moved for {length} ({words}, iteration {iteration}), in {silence.where()}"
    )
    return f"{said}; {ranks}" if ranks else said


def _named(scope: BaseScope) -> str:
    return scope.name if scope.index is None else f"{scope.name} {scope.index}"
