"""The names a training program uses: ``scope``, ``mark``, ``epochs``, ``batches``.

They find the process's recorder themselves. Without one they cost next to nothing and record
nothing, except that the last marks made before ``profile()`` are kept for it (their owner is the
seed's ``"root"`` sentinel). A child process that was started while its parent was recording begins
to record at its first scope or mark, from the carrier in its environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from opentelemetry import trace as otel_trace

from cirron_otel import children, recorder
from cirron_otel.batch_counts import counts_of
from cirron_otel.core import make_mark, record_number
from cirron_otel.decorators import decorated
from cirron_otel.joined import JoinedScope
from cirron_otel.lifecycle import Lifecycle
from cirron_otel.loops import Loops
from cirron_otel.passes import EVALUATION, TRAIN
from cirron_otel.provider import OwnSpans
from cirron_otel.scope_base import BaseScope
from cirron_otel.scope_handle import ScopeHandle
from cirron_otel.spans import ScopeSpan

if TYPE_CHECKING:
    from types import TracebackType

    from opentelemetry.util.types import Attributes

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])
_MISSING: Any = object()
_INT_MIN, _INT_MAX = -(2**63), 2**63 - 1


# --- scope ---------------------------------------------------------------------------------------


class _Decorates:
    """What makes a scope a decorator, too: each call of the function is a scope of its own."""

    __slots__ = ()
    name: str
    index: int | None
    attrs: dict[str, Any]

    def __call__(self, fn: _F) -> _F:
        """Wrap ``fn`` (function, coroutine function, generator, async generator)."""
        # Through scope() itself, which vanishes from compiled code. An index that could not be used
        # stands among the attributes: as the index again it is judged as it was the first time.
        return decorated(fn, lambda: scope(self.name, **{"index": self.index, **self.attrs}))


class Scope(_Decorates, ScopeSpan):
    """What ``ci.scope()`` returns; see :class:`cirron_otel.scope_base.BaseScope`."""

    __slots__ = ()


class TimedScope(Scope):
    """One scope in 64 measures what it costs: the source of ``cirron.overhead_ns``."""

    __slots__ = ()

    #: What opening took, ns; 0: it was not opened, or has been counted.
    _cost: int = 0

    def __enter__(self) -> Self:
        """As for any scope, timed."""
        rec = self._rec
        rec.spans.scope_class = rec.quick_kind = Scope
        clock = rec.clock.monotonic_ns
        begun = clock()
        super().__enter__()
        self._cost = clock() - begun
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """As for any scope, timed."""
        rec = self._rec
        clock = rec.clock.monotonic_ns
        begun = clock()
        super().__exit__(exc_type, exc, tb)
        if self._cost:
            note_cost(rec, self._cost + clock() - begun)
            self._cost = 0


def note_cost(rec: recorder.Recorder, cost_ns: int) -> None:
    """Take one measured cost into the running estimate."""
    known = rec.overhead_ns
    if not known:
        rec.overhead_ns = float(cost_ns)
    elif cost_ns < known:
        # The first one measured is a cold one and must not weigh for long.
        rec.overhead_ns = known + (cost_ns - known) / 4
    else:
        rec.overhead_ns = known + (min(cost_ns, 4 * known) - known) / 16


class Joined(_Decorates, JoinedScope):
    """A scope of a joined provider as ``ci.scope()`` returns it."""

    __slots__ = ()


class IdleScope(_Decorates):
    """A scope while nothing is recorded: every method is there and does nothing.

    Inside a region that ``torch.compile`` compiles it stands for every scope, so its methods must
    stay as plain as they are.
    """

    __slots__ = ("attrs", "index", "name")

    #: Spool id; None because nothing is recorded.
    id: str | None = None

    def __init__(self, name: str, index: int | None, attrs: dict[str, Any]) -> None:
        self.name = name
        self.index = index
        self.attrs = attrs

    def __enter__(self) -> Self:
        """Do nothing."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Do nothing."""

    async def __aenter__(self) -> Self:
        """Do nothing."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Do nothing."""

    def set_attribute(self, key: str, value: object) -> None:
        """Do nothing."""

    def set_attributes(self, attributes: Mapping[str, object]) -> None:
        """Do nothing."""

    def add_event(
        self, name: str, attributes: Attributes = None, timestamp: int | None = None
    ) -> None:
        """Do nothing."""

    def add_link(self, context: otel_trace.SpanContext, attributes: Attributes = None) -> None:
        """Do nothing."""

    def update_name(self, name: str) -> None:
        """Do nothing."""

    def set_status(
        self,
        status: otel_trace.Status | otel_trace.StatusCode,
        description: str | None = None,
    ) -> None:
        """Do nothing."""

    def record_exception(
        self,
        exception: BaseException,
        attributes: Attributes = None,
        timestamp: int | None = None,
        escaped: bool = False,  # noqa: FBT001, FBT002 - OTel's signature
    ) -> None:
        """Do nothing."""

    def end(self, end_time: int | None = None) -> None:
        """Do nothing."""

    def is_recording(self) -> bool:
        """No."""
        return False

    def get_span_context(self) -> otel_trace.SpanContext:
        """The invalid one."""
        return otel_trace.INVALID_SPAN_CONTEXT


otel_trace.Span.register(IdleScope)


def scope(
    name: Any = _MISSING,  # noqa: ANN401 - what is no string becomes one
    /,
    index: int | None = None,
    **attrs: Any,
) -> ScopeHandle:
    """A named span of time: ``with ci.scope("x", index=3, lr=0.1) as s: ...``.

    Also a decorator, for sync and async functions and generators, and an async context manager.
    It opens at ``__enter__`` under the innermost open scope of the current context (in a new
    thread: under the session) and closes itself and nothing else at ``__exit__``. An exception
    that passes through is recorded (status, ``exception`` event, attribute ``error``) and flies on
    unchanged. Deeper than 64 scopes nothing is recorded; the body still runs.

    ``index`` numbers it among its siblings; every other keyword is an attribute, whatever its
    name. Safe from any thread; never raises, never blocks.
    """
    if name is _MISSING:
        name = attrs.pop("name", "")
    if type(name) is not str:
        name = _text(name)
    rec = recorder._current or _in_child()  # noqa: SLF001
    if rec is None:
        return IdleScope(name, index, attrs)
    if index is not None and (type(index) is not int or not _INT_MIN <= index <= _INT_MAX):
        index, attrs = _checked_index(rec, name, index, attrs)
    # One of the classes above (see adopt); a cast would be a call.
    return rec.spans.scope_class(rec, name, index, attrs)  # type: ignore[return-value]


def _text(name: object) -> str:
    """A name that is no plain string, as one; a ``__str__`` of the user's may do anything."""
    try:
        return "".join(str(name))
    except Exception:  # noqa: BLE001 - whatever the user's object raises
        return f"<{type(name).__name__}>"


def _checked_index(
    rec: recorder.Recorder, name: str, index: object, attrs: dict[str, Any]
) -> tuple[int | None, dict[str, Any]]:
    try:
        number = int(index.__index__())  # type: ignore[attr-defined]
        if _INT_MIN <= number <= _INT_MAX:
            return number, attrs
    except Exception:  # noqa: BLE001, S110 - whatever the user's object raises
        pass
    rec.guard.warn(
        "index", f"scope {name!r}: its index is no 64-bit integer; it is kept as an attribute"
    )
    return None, {"index": index, **attrs}


# --- mark ----------------------------------------------------------------------------------------


def mark(
    name: Any = _MISSING,  # noqa: ANN401
    value: Any = _MISSING,  # noqa: ANN401
    /,
    *,
    kind: str = "point",
    **attrs: Any,
) -> None:
    """A named value on the innermost open scope: ``ci.mark("loss", loss)``.

    ``value`` is a bool, int, float, str, Decimal, or a one-element scalar of numpy, torch, jax or
    TensorFlow of any type on any device; a device value is copied in stream order and read later
    by the flush thread, so the caller never waits. ``kind="point"`` is one point of a series,
    ``kind="summary"`` the scope's final value. Other keywords are attributes of the mark.

    Anything else as value is dropped, counted in ``health()`` and explained once in the log. Safe
    from any thread; never raises.
    """
    if name is _MISSING:
        name = attrs.pop("name", "")
    if value is _MISSING:
        value = attrs.pop("value", None)
    rec = recorder._current or _in_child()  # noqa: SLF001
    if rec is None:
        recorder.early_marks.keep(name, value, kind, attrs)
        return
    try:
        if attrs or kind != "point" or not record_number(rec, name, value):
            rec.mark(name, value, kind, attrs)
    except Exception as error:  # noqa: BLE001 - see _guard
        rec.guard.swallow("mark", error)


# A frame of Python would be a tenth of what a mark takes.
mark = make_mark(mark, vars(recorder), "(name, value, /, *, kind='point', **attrs)")


# --- loops ---------------------------------------------------------------------------------------


class Loop(Generic[_T]):
    """What ``ci.epochs`` and ``ci.batches`` return: an iterator that knows its source's length."""

    __slots__ = ("_generator", "_source")

    def __init__(self, generator: Iterator[_T], source: Iterable[_T]) -> None:
        self._generator = generator
        self._source = source

    def __iter__(self) -> Iterator[_T]:
        """The iterator itself, at its own speed."""
        return self._generator

    def __next__(self) -> _T:
        """The next item."""
        return next(self._generator)

    def __len__(self) -> int:
        """The length of the source; TypeError if it has none."""
        return len(self._source)  # type: ignore[arg-type]

    def close(self) -> None:
        """End the loop's scopes now."""
        self._generator.close()  # type: ignore[attr-defined]


def epochs(iterable: Iterable[_T]) -> Loop[_T]:
    """Loop over epochs: each item's body is an ``epoch`` scope, ``index`` counts from 0.

    Inside another ``ci.epochs`` it opens nothing and says so once. Never raises of its own; what
    ``iterable`` raises is the caller's.
    """
    return Loop(_epochs(iterable), iterable)


def _epochs(iterable: Iterable[_T]) -> Iterator[_T]:
    rec = recorder._current or _in_child()  # noqa: SLF001
    if rec is None or rec.loops is None:
        yield from iterable
        return
    epoch: BaseScope | None = None
    rec.loops.plan(iterable)
    for index, item in enumerate(iterable):
        nested = False
        try:
            nested = rec.loops.is_inside_epochs()
            if nested:
                rec.guard.warn(
                    "nested_epochs",
                    "ci.epochs inside other epochs (of ci.epochs, or of a framework that runs its "
                    "own loop) opens none; use ci.scope()",
                )
            epoch = None if nested else rec.loops.open_epoch(index)
        except Exception as error:  # noqa: BLE001 - see _guard
            rec.guard.swallow("epochs", error)
        try:
            yield item
        finally:
            if epoch is not None:
                _guarded(rec, rec.loops.end_epoch, epoch)


def batches(
    iterable: Iterable[_T],
    *,
    stage: str | None = None,
    tokens: Callable[[_T], Any] | None = None,
    samples: Callable[[_T], Any] | None = None,
) -> Loop[_T]:
    """Loop over batches: each body is a ``step`` scope that begins with its ``data_load``.

    Without a surrounding ``ci.epochs`` a training loop makes its own ``epoch``. ``stage``
    (``"train"`` or ``"evaluation"``) says what the loop is for; by default it is evaluation when
    torch is not recording gradients or the model is in eval mode at the first fetch. Evaluation
    steps lie in one ``evaluation`` scope. Inside another step of ``ci.batches`` the bodies are
    ``micro_batch`` scopes. Never raises of its own; what ``iterable`` raises is the caller's.

    ``tokens`` and ``samples`` take a batch and return how many of each it holds on this rank: a
    number, also one on a device, which is read later. They become marks of the step, and rates.
    With ``tokens`` alone samples are counted too: the first dimension of the first tensor.
    """
    return Loop(_batches(iterable, stage, tokens, samples), iterable)


def _batches(
    iterable: Iterable[_T], stage: str | None, tokens: object, samples: object
) -> Iterator[_T]:
    rec = recorder._current or _in_child()  # noqa: SLF001
    if rec is None or rec.loops is None:
        yield from iterable
        return
    if stage is not None and (type(stage) is not str or stage not in (TRAIN, EVALUATION)):
        given = repr(stage) if type(stage) is str else type(stage).__name__
        rec.guard.warn(
            "stage", f"ci.batches(stage={given}) is neither 'train' nor 'evaluation'; ignored"
        )
        stage = None
    here = rec.loops.here
    clock = rec.clock
    tick = clock.monotonic_ns
    this = rec.loops.begin(explicit=True, stage=stage, source=iterable)
    counts = None
    if tokens is not None or samples is not None:
        counts = counts_of(rec, tokens, samples)
    fetch = iter(iterable).__next__
    try:
        while True:
            begun = tick()
            here.fetching += 1
            try:
                item = fetch()
            except StopIteration:
                return
            except BaseException as error:
                offset = clock.offset_ns
                _guarded(rec, this.failed, begun + offset, tick() + offset, error)
                raise
            finally:
                here.fetching -= 1
            # One offset for both: the wall clock may have been stepped during the fetch.
            offset = clock.offset_ns
            _guarded(rec, this.fetched, begun + offset, tick() + offset)
            if counts is not None:
                _guarded(rec, counts.count, item)
            yield item
            if counts is not None:
                _guarded(rec, counts.mark)
            _guarded(rec, this.before_fetch)
    finally:
        if counts is not None and this.step is not None and this.step.is_open:
            _guarded(rec, counts.mark)  # the loop was left in the middle of a body
        _guarded(rec, this.finish)


def _guarded(rec: recorder.Recorder, call: Callable[..., object], *args: object) -> None:
    try:
        call(*args)
    except Exception as error:  # noqa: BLE001 - see _guard
        rec.guard.swallow("batches", error)


def adopt(rec: recorder.Recorder) -> recorder.Recorder:
    """Give a new recorder its kind of scope and its loops."""
    spans = rec.spans
    if isinstance(spans, OwnSpans):
        spans.scope_class, spans.timed_class = Scope, TimedScope
        rec.quick_kind = Scope
    else:
        spans.scope_class = Joined
    rec.loops = Loops(rec)
    return rec


def _in_child() -> recorder.Recorder | None:
    """The recorder of a child process whose parent records, started by its first scope."""
    rec = children.start_from_carrier()
    if rec is None:
        return None
    adopt(rec)
    lifecycle = Lifecycle(rec)
    lifecycle.install()
    rec.undo = lifecycle.uninstall
    return rec
