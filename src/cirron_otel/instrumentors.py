"""Recording without a line of code: ``opentelemetry-instrument python train.py``.

One class per framework, with the methods that OpenTelemetry's instrumentors have; the entry points
in ``opentelemetry_instrumentor`` name them. A recording starts when the first of the frameworks is
imported, with the settings of environment and files, and ends with the program. A ``ci.profile()``
of the program ends it and takes its place. Loading this module loads nothing else of ours.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar, Self

from cirron_otel._guard import logger
from cirron_otel.imports import when_imported

if TYPE_CHECKING:
    from cirron_otel.profiler import Profiler


class _Automatic:
    """The recording that was started for them all, and the frameworks that asked for one."""

    lock = threading.RLock()
    names: ClassVar[list[str]] = []
    profiler: ClassVar[Profiler | None] = None


class Instrumentor:
    """What the instrumentors of all frameworks have in common. One instance each."""

    #: As ``profile(frameworks=[...])`` names it.
    framework: ClassVar[str]
    #: What its user installs.
    distribution: ClassVar[str]
    _instance: ClassVar[Instrumentor | None] = None
    _instrumented = False

    def __new__(cls) -> Self:
        """The one instance of this class."""
        found = vars(cls).get("_instance")
        if not isinstance(found, cls):
            found = super().__new__(cls)
            cls._instance = found
        return found

    @property
    def is_instrumented_by_opentelemetry(self) -> bool:
        """Whether ``instrument()`` was called last."""
        return self._instrumented

    def instrumentation_dependencies(self) -> Collection[str]:
        """The distribution that is instrumented."""
        return (self.distribution,)

    def instrument(self, **kwargs: Any) -> None:
        """Hook the framework as soon as it is imported, and record from then on.

        The keywords are OpenTelemetry's and are not needed. Does nothing where the framework is not
        installed, and in a child of a process that records. Never raises.
        """
        try:
            if self._instrumented:
                logger.warning("cirron-otel: %s is instrumented already", self.framework)
                return
            from cirron_otel.hooks import FRAMEWORKS, is_installed  # noqa: PLC0415 - see module

            if not is_installed(self.framework):
                if not kwargs.get("skip_dep_check"):
                    install = FRAMEWORKS[self.framework].install
                    logger.error("cirron-otel: %s is not installed: %s", self.framework, install)
                return
            self._instrumented = True
            with _Automatic.lock:
                if self.framework not in _Automatic.names:
                    _Automatic.names.append(self.framework)
            for package in FRAMEWORKS[self.framework].packages:
                when_imported(package, self._begin)
        except Exception as error:  # noqa: BLE001 - see _guard
            logger.warning("cirron-otel: %s was not instrumented: %r", self.framework, error)

    def uninstrument(self, **_kwargs: Any) -> None:
        """Put the framework back as it was; the recording ends with the last one. Never raises."""
        if not self._instrumented:
            logger.warning("cirron-otel: %s is not instrumented", self.framework)
            return
        self._instrumented = False
        try:
            with _Automatic.lock:
                _Automatic.names.remove(self.framework)
                profiler = _Automatic.profiler
                if profiler is None:
                    return
                if _Automatic.names:
                    profiler.unhook(self.framework)
                else:
                    _Automatic.profiler = None
                    profiler.shutdown()
        except Exception as error:  # noqa: BLE001 - see _guard
            logger.warning("cirron-otel: %s was not uninstrumented: %r", self.framework, error)

    def _begin(self, _framework: object) -> None:
        """The framework is there: start the recording, or add the framework's hook to it."""
        if not self._instrumented:
            return
        try:
            from cirron_otel import children, profiler  # noqa: PLC0415 - see module

            with _Automatic.lock:
                running = profiler.running()
                if running is not None and running.enabled:
                    if running is _Automatic.profiler:
                        running.hook(self.framework)
                    return
                if running is not None or children.is_recorded_by_parent():
                    return  # the program has said what it wants, or our parent records
                _Automatic.profiler = profiler.profile(frameworks=list(_Automatic.names))
                _Automatic.profiler.automatic = True
        except Exception as error:  # noqa: BLE001 - in the middle of the program's import
            logger.warning("cirron-otel: nothing is recorded: %r", error)


class AccelerateInstrumentor(Instrumentor):
    """For Accelerate."""

    framework = "accelerate"
    distribution = "accelerate"


class KerasInstrumentor(Instrumentor):
    """For Keras, on any backend."""

    framework = "tensorflow"
    distribution = "keras >= 3"


class LightningInstrumentor(Instrumentor):
    """For ``lightning`` and ``pytorch_lightning``."""

    framework = "lightning"
    distribution = "lightning >= 2"


class SklearnInstrumentor(Instrumentor):
    """For the estimators of scikit-learn and of what derives from them."""

    framework = "sklearn"
    distribution = "scikit-learn >= 1.3"


class TorchInstrumentor(Instrumentor):
    """For PyTorch."""

    framework = "torch"
    distribution = "torch >= 2.2"


class TransformersInstrumentor(Instrumentor):
    """For the Trainer of transformers, and ``generate``."""

    framework = "transformers"
    distribution = "transformers >= 4.46"
