"""What the hooks into loops have in common: a scope around a call, a mark, what never raises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from cirron_otel.core import record_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron_otel.recorder import Recorder

#: What belongs to a framework: its objects, and what its functions take and return.
Foreign: TypeAlias = Any


def in_scope(rec: Recorder, name: str, attrs: dict[str, Any], call: Callable[[], Any]) -> Foreign:
    """``call()`` in a scope, if one can be opened; its exceptions are recorded and fly on."""
    scope = None
    try:
        scope = rec.make_scope(name, None, attrs)
        scope.__enter__()
    except Exception as error:  # noqa: BLE001 - see _guard
        rec.guard.swallow(f"hooks.{name}", error)
    try:
        result = call()
    except BaseException as error:
        if scope is not None:
            scope.__exit__(type(error), error, error.__traceback__)
        raise
    if scope is not None:
        scope.__exit__(None, None, None)
    return result


def mark(rec: Recorder, name: str, value: object, kind: str = "point") -> None:
    """A mark on the current scope; never raises, never waits for a device."""
    try:
        if not rec.active:
            return
        if type(value) is not float and _is_on_host(value):
            value = value.item()  # type: ignore[attr-defined]
        if kind != "point" or not record_number(rec, name, value):
            rec.mark(name, value, kind, {})
    except Exception as error:  # noqa: BLE001 - see _guard
        rec.guard.swallow("hooks.mark", error)


def _is_on_host(value: object) -> bool:
    """Whether this is a tensor of torch whose one number is there: reading it waits for nobody."""
    return getattr(getattr(value, "device", None), "type", None) == "cpu"


def is_number(value: object) -> bool:
    """Whether a mark can hold it: a number, or an array or tensor with one element."""
    if isinstance(value, (int, float)):
        return True
    try:
        shape = tuple(value.shape)  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001 - an object of the program's, of any kind
        return False
    return all(size == 1 for size in shape)
