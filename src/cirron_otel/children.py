"""How a child process finds the recording of its parent.

``profile()`` puts a carrier into the environment: where the spool is, which run and which scope
the parent is in, no secrets. A child that has nothing else (spawn, forkserver, subprocess) starts
from it, at its first scope or mark and not before.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from cirron_otel import recorder, semconv
from cirron_otel._guard import logger
from cirron_otel.errors import ConfigurationError
from cirron_otel.scope_base import BaseScope, carried
from cirron_otel.settings import Settings
from cirron_otel.version import VERSION

_VERSION = 1


class _Way:
    """Whether this process may still start from its parent's carrier."""

    open = True


def close_way() -> None:
    """This process has its own recording, or none any more: the carrier starts none from now on."""
    _Way.open = False


def carrier(rec: recorder.Recorder, parent: BaseScope) -> str:
    """What a child of this process needs, as text for the environment."""
    return msgspec.json.encode(
        {
            "version": _VERSION,
            "pid": os.getpid(),
            "run_id": rec.run_id,
            "attempt": rec.run_state.attempt,
            "session": rec.session.id if rec.session is not None else None,
            "parent": carried(parent),
            "settings": rec.settings.to_carrier(),
        }
    ).decode()


def parent_session() -> tuple[int, int] | None:
    """Trace and span id of the session that a parent process records; None where none does.

    For a child that records by itself. Never raises.
    """
    try:
        found = _found()
        if found is None:
            return None
        parent = found["parent"]
        return int(parent["trace_id"], 16), int(parent["id"][:16], 16)
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return None


def is_recorded_by_parent() -> bool:
    """Whether a parent process records, and this one is no other rank of its training.

    Then a scope or mark here goes to the parent's recording. Never raises.
    """
    try:
        found = _found()
        if found is None:
            return False
        settings = found["settings"]
        theirs, ours = Settings.from_carrier(settings, {}), Settings.from_carrier(settings)
    except (msgspec.DecodeError, ConfigurationError, KeyError, TypeError):
        return False
    return (theirs.rank, theirs.world_size) == (ours.rank, ours.world_size)


def _found() -> dict[str, Any] | None:
    """A parent's carrier, as it is; None where there is none that we can use."""
    text = os.environ.get(semconv.CARRIER_VARIABLE)
    if not text:
        return None
    found: dict[str, Any] = msgspec.json.decode(text)
    return None if found["version"] != _VERSION or found["pid"] == os.getpid() else found


def start_from_carrier() -> recorder.Recorder | None:
    """Start this process's recorder from the carrier, once; None if there is none for it."""
    if not _Way.open:
        return None
    if not os.environ.get(semconv.CARRIER_VARIABLE):
        close_way()  # a process finds its carrier when it starts, or never
        return None
    try:
        found = _found()
        if found is None:
            return None
        settings = Settings.from_carrier(found["settings"])
        if not settings.enabled:
            return None
        rec = recorder.Recorder(settings, sdk_version=VERSION, carrier=found)
    except Exception as error:  # noqa: BLE001 - a carrier of another version, or of nobody
        logger.warning("cirron-otel: %s is not usable: %r", semconv.CARRIER_VARIABLE, error)
        close_way()
        return None
    recorder.install(rec)
    return rec
