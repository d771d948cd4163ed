"""scikit-learn: the calls of estimators.

``ci.wrap`` records the estimators it is given (:mod:`cirron_otel.hooks.sklearn.wrapping`). The
hook, which is there where ``frameworks`` names ``"sklearn"``, records those of all classes: it puts
recorded methods into every class of estimators there is and that is defined while it is in place.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

from cirron_otel.hooks.patches import Patches
from cirron_otel.hooks.sklearn.calls import methods_of, recorded
from cirron_otel.hooks.sklearn.classes import is_recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cirron_otel.recorder import Recorder

_HOOK = "__init_subclass__"


def make(rec: Recorder) -> SklearnHook:
    """The hook for one recorder, not in place yet."""
    return SklearnHook(rec)


class SklearnHook:
    """See :class:`cirron_otel.hooks.Hook`."""

    def __init__(self, rec: Recorder) -> None:
        self._rec = rec
        self._patches = Patches()
        self._seen: set[type] = set()
        self._undo: list[Callable[[], None]] = []
        self.active = False

    def instrument(self) -> None:
        """Put the recorded methods into the classes; all of it or nothing."""
        self.active = True
        try:
            base: type = sys.modules["sklearn.base"].BaseEstimator
            for kind in list(_below(base)):
                self._patch(kind)
            output = sys.modules.get("sklearn.utils._set_output")
            mixin = getattr(output, "_SetOutputMixin", None)
            for one in filter(None, (base, mixin)):
                self._see_subclasses_of(one, mixin)
        except BaseException:
            self.uninstrument()
            raise

    def uninstrument(self) -> None:
        """Put the classes back. Methods that were wrapped again meanwhile record nothing."""
        self.active = False
        while self._undo:
            self._undo.pop()()
        self._patches.undo()
        self._seen.clear()

    def _patch(self, kind: type) -> None:
        """Record the methods that a class of estimators and its bases define."""
        for one in kind.__mro__:
            if one in self._seen or one is object or is_recorded(one):
                continue
            self._seen.add(one)
            for name, found in list(methods_of(one, own=True)):
                method = recorded(name, found, self)
                if method is not found:
                    self._patches.replace(one, name, method)

    def _see_subclasses_of(self, base: type, mixin: type | None) -> None:
        """Have ``base`` tell of each class that is derived from it.

        scikit-learn's mixin for ``set_output`` wraps methods of new classes; only then are they
        what they will be, and ours come around them.
        """
        original: Any = vars(base).get(_HOOK)
        hook, start = self, cast("Any", base)

        def init_subclass(cls: Any, /, **kwargs: Any) -> None:  # noqa: ANN401 - any class
            if original is None:
                super(start, cls).__init_subclass__(**kwargs)
            else:
                original.__get__(None, cls)(**kwargs)
            try:
                if hook.active and (base is mixin or mixin is None or not issubclass(cls, mixin)):
                    hook._patch_new(cls)
            except Exception as error:  # noqa: BLE001 - see _guard
                hook._rec.guard.swallow("sklearn", error)

        ours: Any = classmethod(init_subclass)
        setattr(base, _HOOK, ours)

        def undo() -> None:
            if vars(base).get(_HOOK) is not ours:
                return
            if original is None:
                delattr(base, _HOOK)
            else:
                setattr(base, _HOOK, original)

        self._undo.append(undo)

    def _patch_new(self, kind: type) -> None:
        base: type = sys.modules["sklearn.base"].BaseEstimator
        if issubclass(kind, base):
            self._patch(kind)


def _below(kind: type) -> Iterator[type]:
    """All classes derived from ``kind``, each at least once."""
    below: list[type] = type.__subclasses__(kind)
    for one in below:
        yield one
        yield from _below(one)
