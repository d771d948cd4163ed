"""Hooks into training frameworks: one file each, with OTel's verbs instrument / uninstrument.

A hook is put in place when its framework is imported, or at once if it already is; we never import
a framework ourselves. The order in which hooks come does not matter: who owns epoch and step is
carried in the OTel context (see :mod:`cirron_otel.driven`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import wrapt

from cirron_otel._guard import logger
from cirron_otel.errors import CirronDependencyError

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
    # There is no hook for it in this version; naming it is warned of.
    "sklearn": Framework("pip install scikit-learn", ("sklearn",)),
    "torch": Framework(
        "pip install torch", ("torch",), (("cirron_otel.hooks.torch", "torch"),)
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

    @classmethod
    def choose(cls, frameworks: Iterable[str] | None) -> HookSet:
        """The hooks to use: those named, or those whose framework can be imported.

        Raises :class:`CirronDependencyError` for a framework that is named and not installed.
        """
        if frameworks is None:
            return cls([name for name in FRAMEWORKS if is_installed(name)])
        named = list(dict.fromkeys(frameworks))
        missing = [name for name in named if name in FRAMEWORKS and not is_installed(name)]
        if missing:
            advice = " && ".join(FRAMEWORKS[name].install for name in missing)
            verb = "is" if len(missing) == 1 else "are"
            raise CirronDependencyError(
                f"profile(frameworks=...) names {', '.join(missing)}, "
                f"which {verb} not installed: {advice}"
            )
        for name in named:
            if name in FRAMEWORKS and not FRAMEWORKS[name].hooks:
                logger.warning("cirron-otel: there is no %s hook in this version", name)
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
            for module, trigger in FRAMEWORKS[name].hooks:
                if trigger in sys.modules:
                    self._instrument(name, module)
                else:
                    wrapt.register_post_import_hook(
                        functools.partial(self._imported, name, module), trigger
                    )

    def _imported(self, name: str, module: str, _imported: object) -> None:
        self._instrument(name, module)

    def _instrument(self, name: str, module: str) -> None:
        rec = self._rec
        if rec is None or module in self._active:
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
        for name, hook in reversed(list(self._active.values())):
            try:
                hook.uninstrument()
            except Exception as error:  # noqa: BLE001 - see _guard
                if rec is not None:
                    rec.guard.swallow(f"hooks.{name}", error)
        self._active.clear()


def is_installed(name: str) -> bool:
    """Whether a framework can be imported; looks for its files, imports nothing."""
    return any(_importable(package) for package in FRAMEWORKS[name].packages)


def _importable(package: str) -> bool:
    if package in sys.modules:
        return True
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
