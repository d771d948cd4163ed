"""Who is to be told when a module has been imported, and may go before it comes.

wrapt's hooks cannot be taken back, so one that held a recording would keep it for ever: there is
one hook for each module and process, and it knows whom to tell by weak references.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from types import ModuleType

import wrapt

_lock = threading.Lock()
#: By name of a module that has not come yet: whom to tell.
_waiting: dict[str, list[weakref.WeakMethod[Callable[[ModuleType], None]]]] = {}


def when_imported(name: str, told: Callable[[ModuleType], None]) -> None:
    """Call the bound method ``told`` with module ``name``: now if it is loaded, else once it is.

    Its object is not kept alive for that. Late calls come on the thread that imports, inside its
    ``import``: the method must not raise, and looks itself whether it is still wanted.
    """
    module = sys.modules.get(name)
    if module is not None:
        told(module)
        return
    with _lock:
        first = name not in _waiting
        waiting = _waiting.setdefault(name, [])
        waiting[:] = [one for one in waiting if one() is not None]
        waiting.append(weakref.WeakMethod(told))
    if first:
        wrapt.register_post_import_hook(_tell, name)  # at once where it has come meanwhile


def _tell(module: ModuleType) -> None:
    with _lock:
        waiting = _waiting.pop(module.__name__, [])
    for one in waiting:
        told = one()
        if told is not None:
            told(module)
