"""What a framework hook does around each call it records, and at each fetch, in Python.

``_hooks.h`` does the same where it was built: after the tensor work of a step the caches are
cold, and every frame and object touched costs many times what it costs in a tight loop.
"""

from __future__ import annotations

import threading
from types import MethodType
from typing import TYPE_CHECKING, Any

from cirron_otel import semconv

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron_otel.recorder import Recorder

FORWARD, BACKWARD, OPTIMIZER_STEP = 0, 1, 2


class _Here(threading.local):
    """What one thread is in the middle of."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_backward = False
        self.stepping: object = None


_here = _Here()


class HookCore:
    """What a recorded call reads of its hook.

    ``compiling[compiling_key]`` is true while the framework captures code, or ``compiling`` is a
    function that says so; ``graph_task()`` is not -1 inside autograd. A subclass has ``run(name,
    attrs, call, args, kwargs)`` and ``note(module, learns)``.
    """

    #: Whether the hook is in place; afterwards a call that somebody kept does nothing of ours.
    active: bool
    #: Whether a device has to be asked for times: then all goes the general way.
    timed: bool
    rec: Recorder
    compiling: dict[str, Any] | Callable[[], bool]
    compiling_key: str
    graph_task: Callable[[], int]
    grad_enabled: Callable[[], bool]

    def silent(self) -> bool:
        """Whether a call that begins now is none to record.

        That is while code is captured, and inside autograd: its threads have no context to find
        a parent in, so what runs there (a recomputed forward, say) is recorded on no device.
        """
        compiling = self.compiling
        return (
            not self.active
            or not self.rec.active
            or bool(compiling() if callable(compiling) else compiling[self.compiling_key])
            or self.graph_task() != -1
        )


class RecordedCall:
    """``original``, each outermost call of it in a scope.

    Called where it was ``forward`` of a module, ``backward``, or the ``step`` of an optimizer:
    module and optimizer are the first argument. It may stand in a class or module as it is, once
    ``functools.update_wrapper`` has given it the name and text of what it replaces.

    With ``method`` it is that method of the first argument that is called, found as ever, and
    ``original`` only where the scope has to be made the general way: both come to the same.
    """

    def __init__(
        self,
        hook: Any,  # noqa: ANN401 - HookCore and its subclass's methods
        what: int,
        name: str,
        original: Callable[..., Any],
        method: str | None = None,  # noqa: ARG002 - saves the compiled one a frame
    ) -> None:
        self.original = original
        self._hook = hook
        self._what = what
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:  # noqa: ANN401
        """As a function in a class: a method of its instances."""
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> str:
        """Its name: it is pickled as the function it is."""
        return str(vars(self)["__qualname__"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
        """Call ``original``; its exceptions are recorded and fly on."""
        hook, what = self._hook, self._what
        before = _here.stepping
        known = {
            FORWARD: _here.depth or not args,
            BACKWARD: _here.in_backward,
            OPTIMIZER_STEP: not args or before is args[0],
        }[what]
        if known or hook.silent():
            return self.original(*args, **kwargs)
        try:
            attrs = self._attrs(args)
        except Exception as error:  # noqa: BLE001 - see _guard
            hook.rec.guard.swallow(self._name, error)
            return self.original(*args, **kwargs)
        if what == FORWARD:
            _here.depth = 1
        elif what == BACKWARD:
            _here.in_backward = True
        else:
            _here.stepping = args[0]
        try:
            return hook.run(self._name, attrs, self.original, args, kwargs)
        finally:
            if what == FORWARD:
                _here.depth = 0
            elif what == BACKWARD:
                _here.in_backward = False
            else:
                _here.stepping = before

    def packed(self, *given: Any) -> Any:  # noqa: ANN401 - passed through
        """``packed([first, ]args, kwargs)``: the call, from a function that was given these."""
        *first, args, kwargs = given
        return self(*first, *args, **kwargs)

    def _attrs(self, args: tuple[Any, ...]) -> dict[str, Any]:
        if self._what == FORWARD:
            training = bool(args[0].training)
            self._hook.note(args[0], training and self._hook.grad_enabled())
            return {semconv.MODE: "train" if training else "eval"}
        return {"optimizer": type(args[0]).__name__} if self._what == OPTIMIZER_STEP else {}


class RecordedFetch:
    """``original`` of an iterator, told to its pass: here always by ``slowly``.

    Compiled it knows the short way for a pass that lies in the iterator's ``__dict__`` under
    ``key``; ``ended(pass, start_ns, end_ns, error)`` is told of a fetch that raised.
    """

    def __init__(
        self,
        hook: HookCore,  # noqa: ARG002 - as the compiled one
        key: str,  # noqa: ARG002
        original: Callable[..., Any],  # noqa: ARG002
        slowly: Callable[..., Any],
        ended: Callable[..., Any],  # noqa: ARG002
    ) -> None:
        self._slowly = slowly

    def __call__(self, iterator: Any) -> Any:  # noqa: ANN401 - the framework's
        """Fetch the next item."""
        return self._slowly(iterator)

    def __get__(self, iterator: Any, owner: type | None = None) -> Any:  # noqa: ANN401
        """As a function in a class: a method of its instances."""
        return self if iterator is None else MethodType(self, iterator)


class PassCore:
    """What a fetch reads of its pass."""

    __slots__ = (
        "_loops", "_place", "count", "epoch", "explicit", "kind", "recorder", "stage", "state",
        "step",
    )  # fmt: skip

    _loops: Any
    recorder: Recorder
    #: The class of the scopes it opens.
    kind: Any
    explicit: bool
    stage: str | None
    #: NEW, OPEN or ENDED.
    state: int
    count: int
    step: Any
    epoch: Any
    #: The scope the steps lie in.
    _place: Any

    def fetched_here(self, start_ns: int, end_ns: int) -> bool:  # noqa: ARG002 - as the compiled one
        """A fetch of a pass under way has returned: the short way; says whether that was it."""
        return False


def inside_forward() -> bool:
    """Whether this thread is inside a recorded forward."""
    return bool(_here.depth)


def is_stepping(optimizer: object) -> bool:
    """Whether the innermost recorded optimizer step of this thread is this optimizer's."""
    return _here.stepping is optimizer


def if_not_stepping(call: Callable[..., Any], optimizer: object, *args: Any) -> Any:  # noqa: ANN401
    """``call(optimizer, *args)``, unless :func:`is_stepping` says that it is stepping."""
    return None if _here.stepping is optimizer else call(optimizer, *args)


def in_compiled_code() -> bool:
    """False; code that is compiled has a stand-in for it that is true."""
    return False


def module_gone(reference: object) -> None:
    """A module that was told of is no more; nothing here remembers its address."""
