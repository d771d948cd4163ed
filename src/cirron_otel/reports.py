"""What a recording says of itself while it runs: its health, and its tree so far."""

from __future__ import annotations

import sys
from typing import IO, TYPE_CHECKING, Any

import msgspec

from cirron_otel import transport
from cirron_otel.errors import CirronError, ConfigurationError
from cirron_otel.provider import sdk_disabled
from cirron_otel.reading import nodes, notes, sessions, text

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder

_FORMATS = ("tree", "dict", "json")
_IDLE_HEALTH: dict[str, Any] = {
    "scope_drop_count": 0, "mark_drop_count": 0, "spool_drop_count": 0,
    "swallowed_error_count": 0, "swallowed_errors": {}, "losses": {}, "spool_dir": None,
    "spool_bytes": 0, "flush_mode": "stopped", "flush_restart_count": 0, "flush_latency_ns": 0,
    "producer_assists": 0, "queued_rows": 0, "pending_device_values": 0, "disk_refuses": False,
    "scope_depth": -1, "open_scopes": 0, "provider": None, "run_id": None, "attempt": None,
    "forward": None, "destinations": [], "forward_restart_count": 0,
    "snapshots": {
        "mode": "off", "taken": 0, "tensors": 0, "skipped": {}, "files": 0, "file_bytes": 0,
        "evicted_files": 0, "last_duration_ns": 0,
    },
    "run": {
        "outcome": None, "error_type": None, "signal": None, "steps": 0, "progress": None,
        "eta": None, "hanging": False, "time": {},
    },
    "findings": {"count": 0, "by_severity": {}, "by_kind": {}, "recent": [], "webhooks": []},
    "tee": {},
}  # fmt: skip


def health_of(
    rec: Recorder | None, installed_hooks: list[str], platform_context: dict[str, str]
) -> dict[str, Any]:
    """The answer of ``health()``: the same keys in every state.

    Fit for an endpoint that is asked every second: no lock, no disk but for one listing before the
    first file of this process is written, a few microseconds.
    """
    answer = {"enabled": False, **_IDLE_HEALTH, "transport": None}
    try:
        if rec is not None:
            answer.update(rec.health())
            answer["enabled"] = rec.active
            answer["transport"] = transport.word(rec.settings)
            # What is there by choice.
            for name in ("run", "snapshots", "tee"):
                part = getattr(rec, name)
                if part is not None:
                    answer[name] = part.health()
    except Exception as error:  # noqa: BLE001 - a health report never fails
        answer["health_error"] = repr(error)
    answer["status"] = _status(answer)
    answer["installed_hooks"] = installed_hooks
    answer["frameworks_installed"] = installed_hooks
    answer["platform_context"] = platform_context
    answer["otel"] = "disabled by OTEL_SDK_DISABLED" if sdk_disabled() else "enabled"
    return answer


def _status(answer: dict[str, Any]) -> str:
    """In one word: ``off``, ``ok``, or ``degraded`` where something is or may be lost now."""
    if not answer["enabled"]:
        return "off"
    troubled = (
        answer["disk_refuses"] or answer["flush_mode"] != "normal" or "health_error" in answer
    )
    return "degraded" if troubled else "ok"


def check_format(form: str) -> None:
    """Raise ConfigurationError (a ValueError) for a format that :func:`tree_of` does not know."""
    if form not in _FORMATS:
        raise ConfigurationError(f"trace(format={form!r}): choose 'tree', 'dict' or 'json'")


def nothing(form: str) -> dict[str, Any] | str | None:
    """The answer in ``form`` when there is no tree."""
    return None if form == "tree" else _answer([], form)


def tree_of(
    rec: Recorder | None, form: str, name: str | None, last: int | None, file: IO[str] | None
) -> dict[str, Any] | str | None:
    """The answer of ``trace()``; ``form`` is a known one.

    Flushes, then reads the spool. Where there is none, or it cannot be read, it says so: printed
    with ``"tree"``, in the log otherwise.
    """
    if rec is None or rec.session is None:
        if form == "tree":
            print("nothing is recorded: call ci.profile() first", file=file or sys.stdout)
        return nothing(form)
    rec.flush()
    try:
        found = sessions.load(
            rec.spool, session=rec.session.id, max_spans=rec.settings.trace_buffer_max_spans
        )
    except (CirronError, OSError) as error:
        why = "output has no 'spool'" if "spool" not in rec.settings.output else str(error)
        if form == "tree":
            print(f"there is no tree to show: {why}", file=file or sys.stdout)
        else:
            rec.guard.repeat_warning("trace", f"there is no tree to show: {why}")
        return nothing(form)
    roots = nodes.select([one.root for one in found], name=name, last=last)
    if form != "tree":
        return _answer(roots, form)
    options = notes.Options(now_ns=rec.clock.now(), titles={rec.session.id: f"run {rec.run_id}"})
    for line in text.plain(roots, options):
        print(line, file=file or sys.stdout)
    return None


def _answer(roots: list[nodes.Node], form: str) -> dict[str, Any] | str:
    answer = nodes.to_dict(roots)
    return answer if form == "dict" else msgspec.json.encode(answer).decode()
