"""Hooks into training frameworks: one file each, with OTel's verbs instrument / uninstrument.

A hook is put in place when its framework is imported, or at once if it already is; we never import
a framework ourselves. The order in which hooks come does not matter: who owns epoch and step is
carried in the OTel context (see :mod:`cirron_otel.driven`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from cirron_otel.imports import is_importable, refuse_missing, when_imported

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder


class Framework(NamedTuple):
    """What there is to know of a framework without importing it."""

    #: How to get it, for the error that says it is missing.
    install: str
    #: Top-level modules; one of them installed is enough.
    packages: tuple[str, ...]
    #: Modules of its hooks and, for each, the module whose import puts it in place.
    hooks: tuple[tuple[str, str], ...] = ()
    #: Whether it is hooked only where ``frameworks=`` names it.
    by_name_only: bool = False


#: By name, the one that may own the loop first.
FRAMEWORKS = {
    "transformers": Framework(
        "pip install 'cirron-otel[transformers]'",
        ("transformers",),
        # The package itself comes long before its trainer, which takes seconds to import.
        (
            ("cirron_otel.hooks.transformers", "transformers.trainer"),
            ("cirron_otel.serving.generate", "transformers.generation.utils"),
        ),
    ),
    "vllm": Framework(
        "pip install vllm",
        ("vllm",),
        (("cirron_otel.serving.vllm", "vllm.v1.engine.async_llm"),),
    ),
    "lightning": Framework(
        "pip install 'cirron-otel[lightning]'",
        ("lightning", "pytorch_lightning"),
        (
            ("cirron_otel.hooks.lightning", "lightning.pytorch"),
            ("cirron_otel.hooks.lightning.standalone", "pytorch_lightning"),
        ),
    ),
    # Keras, on whatever backend it runs.
    "tensorflow": Framework(
        "pip install 'cirron-otel[keras]'",
        ("keras", "tensorflow"),
        (("cirron_otel.hooks.keras", "keras"),),
    ),
    "accelerate": Framework(
        "pip install 'cirron-otel[accelerate]'",
        ("accelerate",),
        (("cirron_otel.hooks.accelerate", "accelerate"),),
    ),
    # Estimators are recorded where `ci.wrap` was asked for them; all of them only on demand.
    "sklearn": Framework(
        "pip install 'cirron-otel[sklearn]'",
        ("sklearn",),
        (("cirron_otel.hooks.sklearn", "sklearn.base"),),
        by_name_only=True,
    ),
    "torch": Framework(
        "pip install torch",
        ("torch",),
        (
            ("cirron_otel.hooks.torch", "torch"),
            ("cirron_otel.hooks.torch.stateful", "torchdata.stateful_dataloader"),
        ),
    ),
}  # fmt: skip


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
        #: By hook module: the framework's name and the hook.
        self._active: dict[str, tuple[str, Hook]] = {}
        #: What waits for a framework; it goes with this set.
        self._waiting: list[Callable[[object], None]] = []

    @classmethod
    def choose(cls, frameworks: Iterable[str] | None) -> HookSet:
        """The hooks to use: those named, or those whose framework can be imported.

        Raises :class:`CirronDependencyError` for a framework that is named and not installed.
        """
        if frameworks is None:
            found = [
                name
                for name, framework in FRAMEWORKS.items()
                if not framework.by_name_only and is_installed(name)
            ]
            return cls(found)
        named = list(dict.fromkeys(frameworks))
        missing = [name for name in named if name in FRAMEWORKS and not is_installed(name)]
        refuse_missing(
            "profile(frameworks=...)", {name: FRAMEWORKS[name].install for name in missing}
        )
        return cls([name for name in FRAMEWORKS if name in named])

    @property
    def names(self) -> list[str]:
        """The frameworks whose hooks are in place now."""
        return list(dict.fromkeys(name for name, _ in self._active.values()))

    def install(self, rec: Recorder) -> None:
        """Put the hooks in place, each as soon as its framework is there."""
        self._rec = rec
        # torch first: hooks of what runs on it ask what its hook goes by.
        for name in reversed(self.wanted):
            self._install(name)

    def _install(self, name: str) -> None:
        for module, trigger in FRAMEWORKS[name].hooks:
            waiting = functools.partial(self._instrument, name, module)
            self._waiting.append(waiting)
            when_imported(trigger, waiting)

    def add(self, name: str) -> None:
        """Put the hooks of one more framework in place."""
        if name not in self.wanted and is_installed(name):
            self.wanted.append(name)
            self._install(name)

    def remove(self, name: str) -> None:
        """Take the hooks of one framework away; the others stay."""
        if name in self.wanted:
            self.wanted.remove(name)
        for module, (owner, hook) in reversed(list(self._active.items())):
            if owner == name:
                del self._active[module]
                self._uninstrument(name, hook, self._rec)

    def _instrument(self, name: str, module: str, _framework: object) -> None:
        rec = self._rec
        if rec is None or name not in self.wanted or module in self._active:
            return
        try:
            hook: Hook = importlib.import_module(module).make(rec)
            hook.instrument()
            self._active[module] = name, hook
            self._tell_session(rec)
        except Exception as error:  # noqa: BLE001 - see _guard
            rec.guard.swallow(f"hooks.{name}", error)

    def _tell_session(self, rec: Recorder) -> None:
        """Name on the session the frameworks that are hooked; a session that has ended stays."""
        session = rec.session
        if session is not None and session.is_open:
            session.attrs = {**session.attrs, "framework": ",".join(self.names)}

    def uninstall(self) -> None:
        """Take the hooks away again, last first."""
        rec, self._rec = self._rec, None
        self._waiting.clear()
        for name, hook in reversed(list(self._active.values())):
            self._uninstrument(name, hook, rec)
        self._active.clear()

    @staticmethod
    def _uninstrument(name: str, hook: Hook, rec: Recorder | None) -> None:
        try:
            hook.uninstrument()
        except Exception as error:  # noqa: BLE001 - see _guard
            if rec is not None:
                rec.guard.swallow(f"hooks.{name}", error)


def is_installed(name: str) -> bool:
    """Whether a framework can be imported; looks for its files, imports nothing."""
    return any(map(is_importable, FRAMEWORKS[name].packages))
