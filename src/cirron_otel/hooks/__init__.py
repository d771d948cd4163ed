"""Hooks into training frameworks: one file each, with OTel's verbs instrument / uninstrument.

A hook is put in place when its framework is imported, or at once if it already is; we never import
a framework ourselves.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import wrapt

from cirron_otel._guard import logger
from cirron_otel.errors import CirronDependencyError

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder

#: Framework -> the module of its hook, in order of priority: who owns epoch and step.
HOOKS = {"torch": "cirron_otel.hooks.torch"}
#: Frameworks that the ancestor hooks and this version does not.
_NOT_YET = frozenset({"transformers", "tensorflow"})
_INSTALL = {"torch": "pip install torch"}


class Hook(Protocol):
    """What each hook module offers as ``make(rec)``."""

    def instrument(self) -> None:
        """Patch the framework. Called once, after the framework was imported."""

    def uninstrument(self) -> None:
        """Put everything back as it was. Called once, on the thread that shuts down."""


class HookSet:
    """The hooks of one recorder."""

    def __init__(self, wanted: list[str]) -> None:
        self.wanted = wanted
        self._rec: Recorder | None = None
        self._active: dict[str, Hook] = {}

    @classmethod
    def choose(cls, frameworks: Iterable[str] | None) -> HookSet:
        """The hooks to use: those named, or those whose framework can be imported.

        Raises :class:`CirronDependencyError` for a framework that is named and not installed.
        """
        if frameworks is None:
            return cls([name for name in HOOKS if _importable(name)])
        named = list(dict.fromkeys(frameworks))
        missing = [name for name in named if name in HOOKS and not _importable(name)]
        if missing:
            advice = " && ".join(_INSTALL[name] for name in missing)
            raise CirronDependencyError(
                f"profile(frameworks=...) names {', '.join(missing)}, "
                f"which is not installed: {advice}"
            )
        for name in named:
            if name in _NOT_YET:
                logger.warning("cirron-otel: there is no %s hook in this version", name)
        return cls([name for name in HOOKS if name in named])

    @property
    def names(self) -> list[str]:
        """The frameworks whose hooks are in place now."""
        return list(self._active)

    def install(self, rec: Recorder) -> None:
        """Put the hooks in place, each as soon as its framework is there."""
        self._rec = rec
        for name in self.wanted:
            if name in sys.modules:
                self._instrument(name)
            else:
                wrapt.register_post_import_hook(functools.partial(self._imported, name), name)

    def _imported(self, name: str, _module: object) -> None:
        self._instrument(name)

    def _instrument(self, name: str) -> None:
        rec = self._rec
        if rec is None or name in self._active:
            return
        try:
            hook: Hook = importlib.import_module(HOOKS[name]).make(rec)
            hook.instrument()
            self._active[name] = hook
            self._tell_session(rec)
        except Exception as error:  # noqa: BLE001 - see _guard
            rec.guard.swallow(f"hooks.{name}", error)

    def _tell_session(self, rec: Recorder) -> None:
        """Name on the session the frameworks that are hooked; a session that has ended stays."""
        session = rec.session
        if session is not None and session.is_open:
            session.attrs = {**session.attrs, "framework": ",".join(self._active)}

    def uninstall(self) -> None:
        """Take the hooks away again, last first."""
        rec, self._rec = self._rec, None
        for name, hook in reversed(list(self._active.items())):
            try:
                hook.uninstrument()
            except Exception as error:  # noqa: BLE001 - see _guard
                if rec is not None:
                    rec.guard.swallow(f"hooks.{name}", error)
        self._active.clear()


def _importable(name: str) -> bool:
    if name in sys.modules:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
