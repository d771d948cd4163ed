"""Training records under a recording: anchors in the spool, ids of spans in the record.

An anchor is the head of a record at one moment. As a log record in the spool it reaches the
collector, and there nobody who holds the training machine can change it: a record that was cut or
rewritten later does not fit its anchors. The scope in which it was made bears it too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from cirron_otel import recorder, semconv, surroundings
from cirron_otel.batch import LogRecord
from cirron_otel.context import get_current
from cirron_otel.scope_base import current_scope, set_place
from cirron_otel.training_record.writing.journal import Anchor, Journal

# OpenTelemetry's severity "INFO".
_INFO_NUMBER, _INFO_TEXT = 9, "INFO"
#: How long the end of the process waits for another thread's line.
_END_WAIT_S = 0.5


def open_journal(directory: str | Path, **arguments: Any) -> Journal:
    """A training record's ``Journal`` that knows the recording, if there is one.

    Takes what it takes and raises what it raises. With a recording, its rank and its account of
    losses (``ci.health()``) are the recording's, its lines name the scope they were made in, its
    anchors go into the spool, and it ends in order when the process is ended by a signal that the
    recording handles, or by ``os._exit``. A recording that begins later gets the anchors, too.
    ``run_start`` says which commit is checked out around the program and which seed torch was
    given, where that is known and the caller gives no ``code`` and ``seed`` of its own.
    """
    arguments["run_start"] = {**_identity(), **arguments.get("run_start", {})}
    rec = recorder._current  # noqa: SLF001 - see recorder
    if rec is not None and rec.active:
        arguments = {"rank": rec.rank, "guard": rec.guard, "clock": rec.clock, **arguments}
    journal = Journal(directory, **{"on_anchor": anchor, "trace": current_ids, **arguments})
    if rec is not None and rec.active and journal.active:
        rec.endings.append(
            lambda signal_name: journal.end(signal_name=signal_name, timeout_s=_END_WAIT_S)
        )
    return journal


def _identity() -> dict[str, object]:
    """What can be known of a run without asking: reads a few small files, starts nothing."""
    commit = surroundings.program_commit()
    torch: Any = sys.modules.get("torch")
    seed = getattr(torch, "initial_seed", None)  # None too while torch is being imported
    found: dict[str, object] = {} if commit is None else {"code": {"commit": commit}}
    if seed is not None:
        found["seed"] = seed()
    return found


def current_ids() -> tuple[str, str] | None:
    """Trace id (32 hex) and span id (16 hex) of the innermost open scope; None without one."""
    rec = recorder._current  # noqa: SLF001 - see recorder
    scope = None if rec is None or not rec.active else current_scope(rec, get_current())
    return None if scope is None else (scope.trace.id, scope.id[:16])


def anchor(made: Anchor) -> bool:
    """Put an anchor into the spool and onto the innermost open scope; says if somebody records.

    Any thread; no I/O, never waits. Raises nothing of the recording's.
    """
    rec = recorder._current  # noqa: SLF001 - see recorder
    if rec is None or not rec.active:
        return False
    scope = current_scope(rec, get_current())
    attributes: dict[str, Any] = {
        semconv.RECORD_RUN_ID: made.run_id,
        semconv.RECORD_SEQ: made.seq,
        semconv.RECORD_HASH: made.hash,
    }
    if scope is not None and scope.is_open:
        scope.set_attributes(attributes)  # type: ignore[attr-defined] # every scope has span_api's
    attributes |= {
        semconv.RECORD_METRICS_DIGEST: made.metrics_digest,
        semconv.RECORD_METRICS_ROWS: made.metrics_rows,
        semconv.RECORD_NAME: made.name,
        semconv.RECORD_EVENT: made.event,
    }
    if made.step is not None:
        attributes[semconv.RECORD_STEP] = made.step
    row = LogRecord(
        made.time_ns, _INFO_NUMBER, _INFO_TEXT, semconv.RECORD_ANCHOR,
        f"training record {made.name!r} at event {made.seq}: {made.hash}", attributes,
    )  # fmt: skip
    set_place(row, scope)
    rec.ensure_started()
    rec.batcher.append_log(row)
    return True
