"""A middleware's request, which the first decorated call inside makes its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from cirron_otel.serving.requests import RequestMethods

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder


class Part:
    """Such a call: it has no scope of its own, and the request goes on when it has ended."""

    __slots__ = ("state", "whole")

    def __init__(self, whole: RequestMethods) -> None:
        self.whole = whole
        self.state = whole.state

    def __exit__(self, _type: object, error: BaseException | None, _tb: object) -> None:
        if error is not None and not isinstance(error, GeneratorExit):
            self.whole.note_inner(error)

    def release(self) -> None:
        """It is not current by this call's doing."""

    def finish(self, error: BaseException | None = None) -> None:
        """Say how the call ended."""
        self.__exit__(None, error, None)


def whole_of(scope: Any) -> RequestMethods:  # noqa: ANN401 - a request or a part of one
    """The request that a call is, or is a part of."""
    return cast("RequestMethods", scope.whole if isinstance(scope, Part) else scope)


def recorder_of(scope: Any) -> Recorder:  # noqa: ANN401 - as above
    """The recorder of a request."""
    return whole_of(scope)._rec  # noqa: SLF001 - a scope's own kind


def join(scope: Any) -> Part | None:  # noqa: ANN401 - any scope
    """The open request of a middleware above, if no call has taken it yet; it is taken now."""
    while scope is not None:
        if isinstance(scope, RequestMethods):
            state = scope.known_state
            if state is None or not state.shared or state.joined or not scope.is_open:
                return None
            state.joined = True
            return Part(scope)
        scope = getattr(scope, "above", None)
    return None
