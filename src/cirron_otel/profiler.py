"""``profile()`` and what it returns: the only way in and the orderly way out."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import IO, TYPE_CHECKING, Any, Literal, TypeVar, overload

from cirron_otel import children, recorder, reports, scopes
from cirron_otel._guard import logger
from cirron_otel.findings import OnFinding, callbacks_of
from cirron_otel.settings import NOT_GIVEN, Settings, resolve
from cirron_otel.starting import start
from cirron_otel.watching import watched

if TYPE_CHECKING:
    from types import TracebackType

    from opentelemetry import trace as otel_trace

    from cirron_otel.hooks import HookSet
    from cirron_otel.lifecycle import Lifecycle
    from cirron_otel.recorder import Recorder
    from cirron_otel.scope_handle import ScopeHandle

_T = TypeVar("_T")
_lock = threading.RLock()


class Profiler:
    """A recording, as ``profile()`` returns it. Also a context manager that shuts down at its end.

    After ``profile(enabled=False)`` every method is there and does nothing.
    """

    def __init__(
        self,
        owner: Cirron,
        settings: Settings,
        rec: Recorder | None,
        hooks: HookSet | None,
        lifecycle: Lifecycle | None,
    ) -> None:
        self.cirron = owner
        self.settings = settings
        self._rec = rec
        self._hooks = hooks
        self._lifecycle = lifecycle
        #: Started for ``opentelemetry-instrument``: the program's own ``profile()`` takes over.
        self.automatic = False

    def hook(self, framework: str) -> None:
        """Put a framework's hook in place as well, now or when it is imported."""
        if self._hooks is not None and self.enabled:
            self._hooks.add(framework)

    def unhook(self, framework: str) -> None:
        """Take a framework's hook away, for the rest of this recording."""
        if self._hooks is not None:
            self._hooks.remove(framework)

    @property
    def enabled(self) -> bool:
        """Whether this profiler records."""
        return self._rec is not None and self._rec.active

    @property
    def installed_hooks(self) -> list[str]:
        """Names of the frameworks whose hooks are in place."""
        return [] if self._hooks is None else self._hooks.names

    @property
    def platform_context(self) -> dict[str, str]:
        """Run, pipeline, deployment and workspace id, those that are known."""
        settings = self.settings
        found = {
            "run_id": settings.run_id,
            "pipeline_id": settings.pipeline_id,
            "deployment_id": settings.deployment_id,
            "workspace_id": settings.workspace_id,
        }
        return {key: value for key, value in found.items() if value is not None}

    @property
    def tracer_provider(self) -> otel_trace.TracerProvider | None:
        """The provider our spans come from: the application's, or our own."""
        return None if self._rec is None else self._rec.spans.provider

    def flush(self, timeout: float = recorder.FLUSH_TIMEOUT_S) -> bool:
        """Write everything recorded so far to the spool; see :func:`flush`."""
        rec = self._rec
        return (
            True
            if rec is None
            else _safely(rec, "flush", lambda: rec.flush(timeout), instead=False)
        )

    def health(self) -> dict[str, Any]:
        """Counts and states; see :func:`health`."""
        return reports.health_of(self._rec, self.installed_hooks, self.platform_context)

    @overload
    def trace(
        self,
        format: Literal["tree"] = "tree",
        name: str | None = None,
        last: int | None = None,
        file: IO[str] | None = None,
    ) -> None: ...
    @overload
    def trace(
        self,
        format: Literal["dict"],
        name: str | None = None,
        last: int | None = None,
        file: IO[str] | None = None,
    ) -> dict[str, Any]: ...
    @overload
    def trace(
        self,
        format: Literal["json"],
        name: str | None = None,
        last: int | None = None,
        file: IO[str] | None = None,
    ) -> str: ...
    def trace(
        self,
        format: str = "tree",  # noqa: A002 - the public name
        name: str | None = None,
        last: int | None = None,
        file: IO[str] | None = None,
    ) -> dict[str, Any] | str | None:
        """Show what was recorded so far; see :func:`trace`."""
        return _tree(self._rec, format, name, last, file)

    def shutdown(self, timeout: float | None = None) -> bool:
        """End the session, write everything, undo every patch; see :func:`shutdown`."""
        with _lock:
            rec = self._rec
            if rec is None:
                recorder.early_marks.wanted = True
                self.cirron._profiler = None  # noqa: SLF001 - its own
                return True
            if not rec.active:
                return True
            return _safely(rec, "shutdown", lambda: self._end(rec, timeout), instead=False)

    def _end(self, rec: Recorder, timeout: float | None) -> bool:
        """Every step, whatever becomes of the one before it."""
        try:
            if self._hooks is not None:
                self._hooks.uninstall()
        finally:
            try:
                done = rec.shutdown(timeout)
            finally:
                if recorder._current is rec:  # noqa: SLF001
                    recorder.install(None)
                self.cirron._profiler = None  # noqa: SLF001
                if self._lifecycle is not None:
                    self._lifecycle.uninstall()
        return done

    def __enter__(self) -> Profiler:  # noqa: PYI034 - never subclassed
        """The profiler itself; it has been recording since ``profile()``."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Shut down; an exception of the block flies on, never one of ours in its place."""
        if self._rec is not None and self._rec.run is not None:
            self._rec.run.leaving(exc)
        try:
            self.shutdown()
        except Exception:  # only in strict mode (see _guard): it was counted and logged
            if exc is None:
                raise


class Cirron:
    """Settings for ``profile()``, given once; ``ci.profile()`` uses a default instance.

    The keywords are the settings of :mod:`cirron_otel.settings`; what is not given comes from
    ``CIRRON_*`` variables, ``~/.cirron/config.toml`` or the defaults. One recording runs at a time
    in a process, whichever instance started it.
    """

    def __init__(self, **settings: Any) -> None:
        self._given = settings
        self._profiler: Profiler | None = None

    def profile(  # noqa: PLR0913, PLR0917 - the public signature, in cirron-sdk's order
        self,
        config: Mapping[str, Any] | None = None,
        frameworks: Iterable[str] | None = None,
        snapshots: Any = NOT_GIVEN,  # noqa: ANN401 - None means off
        sample_rate: float | None = None,
        flush_interval: float | None = None,
        enabled: Any = NOT_GIVEN,  # noqa: ANN401 - True would overrule a file
        path: str | os.PathLike[str] | None = None,
        output: Any = None,  # noqa: ANN401 - a name or several
        *,
        config_path: str | os.PathLike[str] | None = None,
        resources: Iterable[str] | None = None,
        signals: bool | None = None,
        spans: str | None = None,
        set_global: bool | None = None,
        trace_max_spans: int | None = None,
        run_id: str | None = None,
        start_iteration: int | None = None,
        otlp: Any = None,  # noqa: ANN401 - a URL, several, or a mapping
        headers: Mapping[str, str] | None = None,
        forward: str | None = None,
        exit_budget: float | None = None,
        heartbeat: float | None = None,
        ranks: str | None = None,
        export_rate: float | None = None,
        export_burst: int | None = None,
        request_sample_ratio: float | None = None,
        tenant_rate: float | None = None,
        monitor: Any = None,  # noqa: ANN401 - a switch, or a mapping of options
        stop_on: Any = None,  # noqa: ANN401 - a name or several
        on_finding: OnFinding | Iterable[OnFinding] | None = None,
        snapshot_every: int | None = None,
        snapshot_max_bytes: int | None = None,
        watchdog: Any = None,  # noqa: ANN401 - a switch, seconds, or a mapping of them
        terminal: str | None = None,
        tee: Any = None,  # noqa: ANN401 - a name or several
        mirror: str | None = None,
        profile_on: Any = None,  # noqa: ANN401 - a name or several
        flops_per_token: float | None = None,
        device_peak_flops: float | None = None,
    ) -> Profiler:
        """Start recording; see :func:`cirron_otel.profile`."""
        # The parameters above; all but these are settings of the same names.
        call = dict(locals())
        for other in ("self", "config", "config_path", "on_finding"):
            del call[other]
        with _lock:
            current = running()
            if current is not None and current.enabled and current.automatic:
                current.shutdown()
                current = None
            if current is not None and current.enabled:
                logger.warning(
                    "cirron-otel: profile() was called again; the recording goes on as it was, "
                    "call ci.shutdown() first to start another"
                )
                return current
            callbacks = callbacks_of(on_finding)
            settings = resolve(
                call=call, constructor=self._given, config=config, config_path=config_path
            )
            children.close_way()
            if not settings.enabled:
                recorder.early_marks.wanted = False
                self._profiler = Profiler(self, settings, None, None, None)
                _set_default(self)
                return self._profiler
            self._profiler = Profiler(self, settings, *start(settings, callbacks))
            _set_default(self)
            return self._profiler

    def scope(self, *args: Any, **attrs: Any) -> ScopeHandle:
        """As :func:`cirron_otel.scope`."""
        return scopes.scope(*args, **attrs)

    def mark(self, *args: Any, **attrs: Any) -> None:
        """As :func:`cirron_otel.mark`."""
        scopes.mark(*args, **attrs)

    def epochs(self, iterable: Iterable[_T]) -> scopes.Loop[_T]:
        """As :func:`cirron_otel.epochs`."""
        return scopes.epochs(iterable)

    def batches(
        self,
        iterable: Iterable[_T],
        *,
        stage: str | None = None,
        tokens: Callable[[_T], Any] | None = None,
        samples: Callable[[_T], Any] | None = None,
    ) -> scopes.Loop[_T]:
        """As :func:`cirron_otel.batches`."""
        return scopes.batches(iterable, stage=stage, tokens=tokens, samples=samples)

    @overload
    def trace(
        self,
        format: Literal["tree"] = "tree",
        name: str | None = None,
        last: int | None = None,
        file: IO[str] | None = None,
    ) -> None: ...
    @overload
    def trace(
        self,
        format: Literal["dict"],
        name: str | None = None,
        last: int | None = None,
        file: IO[str] | None = None,
    ) -> dict[str, Any]: ...
    @overload
    def trace(
        self,
        format: Literal["json"],
        name: str | None = None,
        last: int | None = None,
        file: IO[str] | None = None,
    ) -> str: ...
    def trace(
        self,
        format: str = "tree",  # noqa: A002 - the public name
        name: str | None = None,
        last: int | None = None,
        file: IO[str] | None = None,
    ) -> dict[str, Any] | str | None:
        """As :func:`cirron_otel.trace`."""
        return _trace(format, name, last, file)

    def flush(self, timeout: float = recorder.FLUSH_TIMEOUT_S) -> bool:
        """As :func:`cirron_otel.flush`."""
        return flush(timeout)

    def health(self) -> dict[str, Any]:
        """As :func:`cirron_otel.health`."""
        return health()

    def shutdown(self, timeout: float | None = None) -> bool:
        """As :func:`cirron_otel.shutdown`."""
        return shutdown(timeout)


class _Default:
    """The instance behind the module's functions."""

    owner: Cirron | None = None


def _set_default(owner: Cirron) -> None:
    _Default.owner = owner


def running() -> Profiler | None:
    """What ``profile()`` returned last, unless it was shut down since."""
    owner = _Default.owner
    return None if owner is None else owner._profiler  # noqa: SLF001


# --- the module's functions ---------------------------------------------------------------------


def profile(  # noqa: PLR0913, PLR0917 - the public signature, in cirron-sdk's order
    config: Mapping[str, Any] | None = None,
    frameworks: Iterable[str] | None = None,
    snapshots: Any = NOT_GIVEN,  # noqa: ANN401 - None means off
    sample_rate: float | None = None,
    flush_interval: float | None = None,
    enabled: Any = NOT_GIVEN,  # noqa: ANN401 - True would overrule a file
    path: str | os.PathLike[str] | None = None,
    output: Any = None,  # noqa: ANN401 - a name or several
    *,
    config_path: str | os.PathLike[str] | None = None,
    resources: Iterable[str] | None = None,
    signals: bool | None = None,
    spans: str | None = None,
    set_global: bool | None = None,
    trace_max_spans: int | None = None,
    run_id: str | None = None,
    start_iteration: int | None = None,
    otlp: Any = None,  # noqa: ANN401 - a URL, several, or a mapping
    headers: Mapping[str, str] | None = None,
    forward: str | None = None,
    exit_budget: float | None = None,
    heartbeat: float | None = None,
    ranks: str | None = None,
    export_rate: float | None = None,
    export_burst: int | None = None,
    request_sample_ratio: float | None = None,
    tenant_rate: float | None = None,
    monitor: Any = None,  # noqa: ANN401 - a switch, or a mapping of options
    stop_on: Any = None,  # noqa: ANN401 - a name or several
    on_finding: OnFinding | Iterable[OnFinding] | None = None,
    snapshot_every: int | None = None,
    snapshot_max_bytes: int | None = None,
    watchdog: Any = None,  # noqa: ANN401 - a switch, seconds, or a mapping of them
    terminal: str | None = None,
    tee: Any = None,  # noqa: ANN401 - a name or several
    mirror: str | None = None,
    profile_on: Any = None,  # noqa: ANN401 - a name or several
    flops_per_token: float | None = None,
    device_peak_flops: float | None = None,
) -> Profiler:
    """Start recording this process: opens the ``cirron.session`` scope and installs the hooks.

    ``path`` is the output directory (default ``./.cirron``), ``config`` an inline ``profiling``
    section, ``frameworks`` which hooks to install (default: those of the installed frameworks;
    ``[]`` for none), ``flush_interval`` seconds between writes. More keywords:
    ``config_path`` (a cirron.yaml), ``resources`` (of ``"cpu"``, ``"memory"``), ``signals``,
    ``spans`` (``"own"`` or ``"all"``), ``set_global``, ``trace_max_spans``, ``run_id``,
    ``start_iteration``; and of what leaves the machine ``otlp`` (a URL, several, or a mapping from
    URL to options), ``headers`` for it, ``forward`` (``"thread"``, ``"process"`` or ``"off"``),
    ``exit_budget`` (seconds), ``heartbeat`` (seconds between two log records that say where the
    program is, 0 for none), ``ranks``, ``export_rate`` and ``export_burst``; of requests
    ``request_sample_ratio`` and ``tenant_rate`` (a second).

    ``snapshots`` says what is kept, at the end of each epoch, of the weights of watched models and
    of those that a framework's loop trains:
    ``"stats"`` (default), ``"sampled"`` (with the tensors themselves at a share ``sample_rate`` of
    the snapshots), ``"full"``, or None for nothing; ``snapshot_every`` takes one every so many
    steps too, ``snapshot_max_bytes`` bounds the files.

    ``monitor=True`` watches the training of the models given to ``watch()`` layer by layer (a
    mapping has the options of ``Monitor``); ``on_finding`` is called with each ``Finding``, on the
    thread that found it (``ci.webhook(url)`` makes a function that posts them); ``stop_on``
    (severities or kinds of findings) ends the training by a ``StopTraining`` at a clean point.

    ``tee`` (of ``"wandb"``, ``"tensorboard"``, ``"mlflow"``, ``"accelerate"``) copies the scalars
    that the program logs there into marks, and an outage of theirs does not end the program;
    ``mirror`` (``"record_function"`` or ``"nvtx"``) shows scopes in torch's profiler or in Nsight;
    ``profile_on`` (severities or kinds of findings) records a few steps with torch's profiler after
    such a finding, see :func:`cirron_otel.profile_window`.

    ``flops_per_token`` (of forward and backward) and ``device_peak_flops`` (of one device, a
    second) make of the tokens counted by ``ci.batches(loader, tokens=...)`` a share of the peak.

    ``watchdog`` tells of a training that has stopped moving (True; seconds; seconds by phase; False
    for never); ``terminal`` says what is shown of the run on stderr: ``"auto"`` (a table at the end
    of a training, on a terminal), ``"summary"`` (the table in any case), ``"progress"`` (one line
    while it runs, too) or ``"none"``.

    Raises :class:`~cirron_otel.errors.ConfigurationError` or
    :class:`~cirron_otel.errors.CirronDependencyError` for a value that cannot be used, before any
    effect. After it has returned, nothing of ours raises into the program. A second call returns
    the running profiler and says so; one that was switched off (``enabled=False``) is not running.
    """
    given = dict(locals())  # exactly the parameters above
    return Cirron().profile(**given)


def watch(
    model: _T,
    *more: Any,
    name: str | None = None,
    buffers: bool | None = None,
    monitor: Any = None,  # noqa: ANN401 - a switch, or a mapping of options
) -> _T:
    """Tell the hooks which model is trained; returns it unchanged.

    May be called before or after ``profile()``, with several models. A watched model's mode
    (``training``) tells an evaluation pass from a training one, and snapshots are taken of it at
    the end of each epoch; ``buffers=True`` has them look at its buffers (running means and the
    like) too. With several watched models, or with ``name``, the tensors are called
    ``<name>.<tensor>``; a model without a name is called like its class. ``watch(None)`` forgets
    all. Models are held weakly, and nothing is put on them.

    ``watch(model, optimizer, monitor=True)`` has the model monitored, as ``profile(monitor=True)``
    has all; ``monitor`` may be a mapping of options, or False for this model alone. The
    record begins with the first step of an optimizer that trains the model.
    """
    try:
        watched.add((model, *more), name=_name_of(name), buffers=buffers, monitor=monitor)
    except Exception as error:  # noqa: BLE001 - see _guard
        logger.warning(
            "cirron-otel: this model cannot be watched, ci.snapshot(model) looks at it by hand: %r",
            error,
        )
    return model


def _name_of(name: object) -> str | None:
    return None if name is None else str(name)


def flush(timeout: float = recorder.FLUSH_TIMEOUT_S) -> bool:
    """Write everything recorded so far to the spool, and have it delivered from there.

    Waits at most ``timeout`` seconds; True when it is on disk (or nothing is recorded). The
    delivery is not waited for. Never raises.
    """
    rec = recorder._current  # noqa: SLF001
    return True if rec is None else _safely(rec, "flush", lambda: rec.flush(timeout), instead=False)


def shutdown(timeout: float | None = None) -> bool:
    """End the recording: close what is open, write and deliver everything, undo every patch.

    Waits at most ``timeout`` seconds in all; without one, 5 s for the disk and then
    ``exit_budget`` seconds (default 3) for destinations. What those did not take in time stays
    on disk, and one line in the log says how to send it. False if something could not be *written*
    in time (then ``health()`` counted it). A second call does nothing. A new ``profile()`` may
    follow. Never raises.
    """
    current = running()
    if current is not None:
        return current.shutdown(timeout)
    rec = recorder._current  # noqa: SLF001
    if rec is None:
        return True
    return _safely(rec, "shutdown", lambda: _end_child(rec, timeout), instead=False)


def _end_child(rec: Recorder, timeout: float | None) -> bool:
    """End a recording that the parent's carrier started; no profiler owns it."""
    children.close_way()
    recorder.early_marks.wanted = False
    try:
        return rec.shutdown(timeout)
    finally:
        recorder.install(None)
        if rec.undo is not None:
            rec.undo()


def health() -> dict[str, Any]:
    """The state of the recording: what was dropped and why, where files are, what is installed.

    The same keys whether anything is recorded or not; ``status`` is the state in one word. Never
    raises, waits for no lock and no disk: fit for an endpoint that is asked every second.
    """
    current = running()
    if current is not None:
        return current.health()
    return reports.health_of(recorder._current, [], {})  # noqa: SLF001


@overload
def trace(
    format: Literal["tree"] = "tree",
    name: str | None = None,
    last: int | None = None,
    file: IO[str] | None = None,
) -> None: ...


@overload
def trace(
    format: Literal["dict"],
    name: str | None = None,
    last: int | None = None,
    file: IO[str] | None = None,
) -> dict[str, Any]: ...


@overload
def trace(
    format: Literal["json"],
    name: str | None = None,
    last: int | None = None,
    file: IO[str] | None = None,
) -> str: ...


def trace(
    format: str = "tree",  # noqa: A002 - the public name
    name: str | None = None,
    last: int | None = None,
    file: IO[str] | None = None,
) -> dict[str, Any] | str | None:
    """Show the tree recorded so far, with what is still open.

    ``"tree"`` prints it to ``file`` (default stdout) and returns None; ``"dict"`` and ``"json"``
    return it. ``name`` keeps the spans of that name and what is under them, ``last`` the newest
    closed ones. Flushes first, then reads the spool: takes as long as that. Raises ``ValueError``
    for another format; for anything else it says what is wrong and shows or returns an empty tree.
    """
    return _trace(format, name, last, file)


def _trace(
    form: str, name: str | None, last: int | None, file: IO[str] | None
) -> dict[str, Any] | str | None:
    current = running()
    rec = recorder._current if current is None else current._rec  # noqa: SLF001
    return _tree(rec, form, name, last, file)


def _tree(
    rec: Recorder | None, form: str, name: str | None, last: int | None, file: IO[str] | None
) -> dict[str, Any] | str | None:
    reports.check_format(form)
    return _safely(
        rec,
        "trace",
        lambda: reports.tree_of(rec, form, name, last, file),
        instead=reports.nothing(form),
    )


def _safely(rec: Recorder | None, place: str, call: Callable[[], _T], *, instead: _T) -> _T:
    """What ``call`` returns, or ``instead`` where it raises: see _guard."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - see _guard
        if rec is None:
            logger.warning("cirron-otel: %s failed: %r", place, error)
        else:
            rec.guard.swallow(place, error)
        return instead
