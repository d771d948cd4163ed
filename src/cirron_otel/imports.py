"""Which libraries can be imported, who is to be told when one has been, and keeping out of some.

wrapt's hooks cannot be taken back, so one that held a recording would keep it for ever: there is
one hook for each module and process, and it knows whom to tell by weak references.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType

import wrapt

from cirron_otel.errors import CirronDependencyError

_Told = Callable[[ModuleType], None]

_lock = threading.Lock()
#: By name of a module that has not come yet: whom to tell.
_waiting: dict[str, list[weakref.ref[_Told]]] = {}


def is_importable(package: str) -> bool:
    """Whether ``package`` is installed; looks for its files, imports only what it lies in."""
    if sys.modules.get(package) is not None:
        return True
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def refuse_missing(where: str, missing: Mapping[str, str]) -> None:
    """Raise :class:`CirronDependencyError` if there are any ``missing``: names, how to install.

    ``where`` is the argument that names them.
    """
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise CirronDependencyError(
            f"{where} names {', '.join(missing)}, which {verb} not installed: "
            + " && ".join(missing.values())
        )


def when_imported(name: str, told: _Told) -> None:
    """Call ``told`` with module ``name``: now if it is loaded, else once it is.

    Neither it nor, for a bound method, its object is kept alive for that; one that waits already
    is called once all the same. Late calls come on the thread that imports, inside its ``import``:
    it must not raise, and looks itself whether it is still wanted.
    """
    module = sys.modules.get(name)
    if module is not None:
        told(module)
        return
    with _lock:
        first = name not in _waiting
        waiting = _waiting.setdefault(name, [])
        waiting[:] = [one for one in waiting if one() not in (None, told)]
        waiting.append(weakref.WeakMethod(told) if inspect.ismethod(told) else weakref.ref(told))
    if first:
        wrapt.register_post_import_hook(_tell, name)  # at once where it has come meanwhile


def _tell(module: ModuleType) -> None:
    with _lock:
        waiting = _waiting.pop(module.__name__, [])
    for one in waiting:
        told = one()
        if told is not None:
            told(module)


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Inside, OpenTelemetry's instrumentations of libraries make no spans, on this thread.

    What is not loaded needs no asking: without an instrumentation there is nothing to suppress.
    """
    utils = sys.modules.get("opentelemetry.instrumentation.utils")
    if utils is None:
        yield
    else:
        with utils.suppress_instrumentation():
            yield
