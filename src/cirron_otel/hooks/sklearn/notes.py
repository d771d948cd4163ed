"""What is known of a recorded estimator that is no attribute of it.

An estimator's attributes are compared, hashed, shown and pickled; what we have to remember of one
lies beside it, by its identity, for as long as it lives.
"""

from __future__ import annotations

import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any

from cirron_otel import recorder
from cirron_otel.context import get_current
from cirron_otel.scope_base import BaseScope, carried, current_scope

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder

#: Where a copy was asked for, as a pickle carries it: run, session, and the scope of that moment.
Place = dict[str, Any]


class Note:
    """What is remembered of one estimator."""

    __slots__ = ("origin", "place", "shares", "step", "thread")

    def __init__(self, step: str | None = None, place: Place | None = None) -> None:
        #: Its name in the pipeline or column transformer that it is a part of.
        self.step = step
        #: The scope in which a copy of it was asked for, or it itself, and the thread that did it.
        self.origin: BaseScope | None = None
        self.thread = 0
        #: What it brought from the process that it was cloned in.
        self.place = place
        #: Whether what it has learnt is still the very objects of the estimator it was made from.
        self.shares = False


class _Notes:
    """The notes by estimator. Any thread."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[Any], Note]] = {}

    def of(self, estimator: object) -> Note | None:
        """The note about ``estimator``, if there is one."""
        found = self._kept.get(id(estimator))
        return None if found is None or found[0]() is not estimator else found[1]

    def keep(self, estimator: object, note: Note) -> None:
        """Remember ``note`` until the estimator is no more. Raises TypeError: no weak reference."""
        kept, key = self._kept, id(estimator)

        def gone(reference: weakref.ref[Any]) -> None:
            found = kept.get(key)
            if found is not None and found[0] is reference:
                kept.pop(key, None)

        kept[key] = weakref.ref(estimator, gone), note


notes = _Notes()


def asked_for(estimator: object, scope: BaseScope) -> None:
    """What this estimator does on another thread or in another process belongs to ``scope``."""
    note = notes.of(estimator)
    if note is None:
        note = Note()
        notes.keep(estimator, note)
    note.origin, note.thread = scope, get_ident()


def cloned(original: object, clone: object) -> None:
    """A clone has the name of what it was cloned from, and belongs where it was asked for."""
    if clone is original:
        return
    known = notes.of(original)
    note = Note() if known is None else Note(known.step, known.place)
    notes.keep(clone, note)
    rec = recorder._current  # noqa: SLF001
    here = current_scope(rec, get_current()) if rec is not None and rec.active else None
    if rec is None or here is None:
        return
    asked = here is not rec.session and here.thread_id == get_ident()
    if not asked and known is not None and known.origin is not None and known.origin.is_open:
        # joblib begins with clones that it makes where it was called, and makes the later ones on a
        # thread that may be older than the call.
        note.origin, note.thread = known.origin, known.thread
    elif here is not rec.session:
        asked_for(clone, here)
        if asked:
            asked_for(original, here)


def packed(estimator: object) -> tuple[str | None, Place | None]:
    """The note as a pickle takes it along.

    What another thread pickles than the one that asked for it is on its way to a worker, whose
    scopes belong where that was. In all other pickles that is nobody's business: joblib's cache
    goes by their bytes.
    """
    note = notes.of(estimator)
    if note is None:
        return None, None
    rec, origin = recorder._current, note.origin  # noqa: SLF001
    if (
        origin is None
        or not origin.is_open
        or note.thread == get_ident()
        or rec is None
        or rec.session is None
    ):
        return note.step, None
    return note.step, {"run": rec.run_id, "session": rec.session.id, "scope": carried(origin)}


def unpacked(estimator: object, step: str | None, place: Place | None) -> None:
    """Take over what :func:`packed` gave."""
    if step is not None or place is not None:
        notes.keep(estimator, Note(step, place))


def place_in(rec: Recorder, note: Note | None) -> dict[str, Any] | None:
    """The scope of another process that calls of this estimator belong to; None: no such one."""
    place = None if note is None else note.place
    if (
        place is None
        or rec.session is None
        or place["run"] != rec.run_id
        or place["session"] != rec.session.id
        or current_scope(rec, get_current()) is not rec.session
    ):
        return None
    scope: dict[str, Any] = place["scope"]
    return scope
