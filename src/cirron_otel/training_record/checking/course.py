"""Through a diary at speed: the compiled walk passes what is beyond doubt, the rest is looked at.

Both keep account of the same things, so what one has found the other is told before it goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from cirron_otel.training_record.checking.reader import (
    Line,
    Readable,
    blocks,
    careful_line,
    too_long,
    unended_line,
)
from cirron_otel.training_record.checking.replay import REPLAYED
from cirron_otel.training_record.compiled import compiled
from cirron_otel.training_record.events import EVENTS, SEVERITIES

if TYPE_CHECKING:
    from cirron_otel.training_record.checking.diary import Diary

#: Events that say more than a line of their own: they are always looked at.
_LOOKED_AT = frozenset(
    {"run_start", "run_end", "manifest", "channels", "channels_cleared", "repair"}
)
#: The walk counts in 64 bits.
_MOST = 2**62


def _forms() -> tuple[tuple[str, tuple[tuple[str, tuple[str, ...]], ...], bool], ...]:
    """By event type, the fields it must have, in order, and which texts each may be."""
    made = []
    for kind, form in EVENTS.items():
        if kind in _LOOKED_AT:
            continue
        texts: dict[str, tuple[str, ...]] = {
            name: (str(value),) for name, value in form.fixed.items()
        }
        texts |= {name: tuple(sorted(allowed)) for name, allowed in form.choices.items()}
        needed = tuple((name, texts.get(name, ())) for name in sorted(form.required))
        made.append((kind, needed, kind in REPLAYED))
    return tuple(made)


_FORMS = _forms()
_SEVERITIES = ("severity", tuple(sorted(SEVERITIES)))


class Course:
    """One pass over a file for a :class:`~cirron_otel.training_record.checking.diary.Diary`."""

    def __init__(self, diary: Diary) -> None:
        self._diary = diary
        self._walk = compiled.Walk(sha256, _FORMS, _SEVERITIES)
        self._number = 1
        #: The last line, where the walk passed it.
        self._passed: bytes | None = None
        if diary.watcher is not None:
            self._walk.stops = diary.watcher.open
        self._walk.with_rows = diary.replay is not None

    def read(self, file: Readable, seen: Callable[[bytes], object]) -> None:
        """Read to the end; ``seen`` gets all bytes. Raises ``OSError`` only."""
        for block in blocks(file, seen):
            if block is None:
                self._take(too_long(self._number))
                continue
            at, size = 0, len(block)
            while at < size:
                at = self._follow(block, at)
                if at < size:
                    at = self._look(block, at)
        self._finish()

    def _follow(self, block: bytes, at: int) -> int:
        """Let the walk pass what it can; where the first line begins that it cannot."""
        diary, walk = self._diary, self._walk
        # The first line and all behind a break are looked at.
        if not diary.count or diary.chain_break is not None or diary.last_step > _MOST:
            return at
        walk.chained = diary.chained
        walk.count, walk.last_step = diary.count, diary.last_step
        walk.last_time = diary.last_time
        if diary.replay is not None:
            walk.row_step, walk.expected = diary.replay.at_hand(_MOST)
            if diary.digested:
                walk.digest, walk.rows = diary.replay.rows.digest, diary.replay.rows.count
        reached: int = walk.follow(block, at)
        if reached > at:
            self._number += walk.count - diary.count
            self._passed = block[walk.last_start : reached - 1]
            diary.chained = walk.chained
            diary.count, diary.last_step = walk.count, walk.last_step
            diary.last_time = walk.last_time
        return reached

    def _look(self, block: bytes, at: int) -> int:
        """Look at one line; where the next one begins."""
        end = block.find(b"\n", at)
        if end < 0:
            if (raw := block[at:]).strip():
                self._take(unended_line(self._number, raw))
            return len(block)
        raw = block[at:end]
        found: tuple[dict[str, Any], bytes] | None = self._walk.line(raw)
        if found is None:
            self._take(careful_line(self._number, raw))
        else:
            self._take(Line(self._number, raw, found[0], None, found[1]))
        return end + 1

    def _take(self, line: Line) -> None:
        self._number += 1
        before = self._diary.count
        self._diary.take(line)
        if self._diary.count > before:
            self._passed = None

    def _finish(self) -> None:
        """Tell the diary what only the walk knows yet."""
        diary, walk = self._diary, self._walk
        diary.kinds.update(walk.seen())
        if diary.watcher is not None:
            diary.watcher.passed(diary.count)
        if diary.replay is not None:
            diary.replay.compared += walk.matched
        if self._passed is not None:
            diary.last = walk.line(self._passed)[0]
