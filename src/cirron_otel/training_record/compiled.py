"""Chooses the compiled way through a record where it was built (``_record.c``).

It takes lines that are beyond doubt; every other line, and every line where it was not built, goes
the way that is written in Python, with the same verdict. ``CIRRON_OTEL_PURE=1`` leaves it aside.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType


def _compiled() -> ModuleType | None:
    if os.environ.get("CIRRON_OTEL_PURE") == "1":
        return None
    try:
        from cirron_otel import _record  # noqa: PLC0415 - it may not be there
    except ImportError:  # no compiler when it was installed, or another Python now
        return None
    return _record


#: The compiled module, or None.
compiled: Any = _compiled()
