"""One wrapped function of a tracker: what it is given is copied, and its outage is no exception."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from cirron_otel.hooks.patches import Patches
from cirron_otel.tee.copying import Copier, here
from cirron_otel.tee.guarding import Guarded, is_outage

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder

#: Names with values, and the step they are of.
Given = tuple[Iterable[tuple[str, object]], object]
#: Says what a call was given, of one step or of several. Takes the call's own arguments.
Reader = Callable[..., Given | list[Given]]


class Tee:
    """The functions of one library that are wrapped. ``uninstrument`` puts them back."""

    def __init__(
        self, rec: Recorder, library: str, outage: Callable[[Exception], bool] = is_outage
    ) -> None:
        self.rec = rec
        self.copier = Copier(rec, library)
        self.guarded = Guarded(rec, library, outage)
        self.patches = Patches()
        #: Whose functions are wrapped.
        self.owners: list[Any] = []

    def wrapped(self, original: Callable[..., Any], reader: Reader | None) -> Callable[..., Any]:
        """``original`` guarded, and copied from where there is a ``reader``."""
        guarded, copier, rec = self.guarded, self.copier, self.rec

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
            if reader is not None and guarded.active and not here.depth:
                try:
                    given = reader(*args, **kwargs)
                    for one in given if isinstance(given, list) else (given,):
                        copier.copy(*one)
                except TypeError:  # not how this function is called: it will say so itself
                    pass
                except Exception as error:  # noqa: BLE001 - see _guard
                    rec.guard.swallow(f"tee.{guarded.library}", error)
            here.depth += 1
            try:
                return guarded.call(original, args, kwargs)
            finally:
                here.depth -= 1

        return call

    def wrap(self, owner: Any, name: str, reader: Reader | None = None) -> Any:  # noqa: ANN401
        """Replace ``owner.name``, where it is one of its own; returns what took its place."""
        original = vars(owner).get(name)
        if not callable(original):
            return None
        made = self.wrapped(original, reader)
        self.patches.replace(owner, name, made)
        self.owners.append(owner)
        return made

    def uninstrument(self) -> None:
        """Put everything back. Functions that somebody kept do what they did without us."""
        self.guarded.active = False
        self.patches.undo()

    def health(self) -> dict[str, Any]:
        """What became of the calls."""
        return {
            "copied": self.copier.copied,
            "failed": self.guarded.failed,
            "skipped": self.guarded.skipped,
            "last_error": self.guarded.last_error,
        }
