"""What ``cirron-otel traces replay`` does: recorded sessions to a receiver of OTLP, once more.

No cursor is read or moved: a replay is somebody's own wish and takes nothing from the delivery.
The spans have the ids they always had, so a receiver that has some of them has them once.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click
import msgspec

from cirron_otel import recovery
from cirron_otel.batch import encode
from cirron_otel.destinations.base import Accepted, Parcel, Rejected
from cirron_otel.destinations.otlp import OtlpDestination
from cirron_otel.destinations.otlp_signals import otlp_receivers
from cirron_otel.errors import CirronError, ConfigurationError
from cirron_otel.otlp.batches import read_batch
from cirron_otel.reading.index import FileInfo, Index, SessionInfo
from cirron_otel.reading.rows import read
from cirron_otel.spool import Spool
from cirron_otel.version import VERSION

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0


class ReplayError(CirronError):
    """The receiver did not take it all."""


@dataclass
class Outcome:
    """What became of a replay."""

    sessions: int = 0
    batches: int = 0
    spans: int = 0
    refused: int = 0
    rejected: int = 0
    missing_marks: int = 0
    note: str = ""


def destination_for(
    otlp: str | None, headers: Sequence[str], protocol: str | None
) -> OtlpDestination:
    """The receiver of a replay: as the options say, for the rest as the environment does."""
    given = dict(_header(text) for text in headers) or None
    options = {"endpoint": otlp, "protocol": protocol} if otlp is not None else True
    targets = otlp_receivers(options, given)
    if not targets:
        raise ConfigurationError("OTEL_SDK_DISABLED=true switches OTLP off: unset it to replay")
    return OtlpDestination(targets[0], pending=False, lasting=False)


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigurationError(f"--header takes NAME=VALUE, not {name[:40]!r}")
    return name, value


def close_what_died(spool: Spool) -> None:
    """Write down what dead writers left open, as the next recording would."""
    try:
        recovery.recover(spool, sdk_version=VERSION)
    except CirronError as error:
        click.echo(f"warning: {error}", err=True)


def replay(
    index: Index,
    chosen: Sequence[SessionInfo],
    destination: OtlpDestination,
    *,
    patience: float,
    show: bool,
) -> Outcome:
    """Send the sessions, oldest batch first; gives up after ``patience`` seconds of no progress.

    Raises :class:`ReplayError` then; what was sent until then is at the receiver.
    """
    outcome = Outcome(sessions=len(chosen))
    files = list(reversed(index.files))
    # A pipe should not be told of progress, and an old click cannot hide its bar.
    showing = (
        click.progressbar(files, label="replaying", file=sys.stderr)
        if show
        else contextlib.nullcontext(files)
    )
    with showing as several:
        for file in several:
            parcel = _parcel(file, chosen)
            if parcel is not None:
                _send(parcel, destination, outcome, patience)
    outcome.spans = destination.counts["spans"]
    outcome.missing_marks = destination.forgotten_marks
    return outcome


def _parcel(file: FileInfo, chosen: Sequence[SessionInfo]) -> Parcel | None:
    """The rows of a file that belong to the chosen sessions; None where it holds none."""
    data = read(file.path)
    if data is None:
        return None
    batch_id = file.path.name.removesuffix(".json").rpartition("-")[2]
    if any(file.source.session_id == info.id for info in chosen):
        return Parcel(batch_id, file.path, data)
    # Rows that were written after the next session had begun, or by a writer that names none:
    # their ids end with half of the id of the session's own trace.
    halves = [info.id[16:] for info in chosen]
    if not any(half.encode() in data for half in halves):
        return None
    batch = read_batch(data)
    spans = [row for row in batch.spans if row.id[16:] in halves]
    marks = [mark for mark in batch.marks if mark.span_id[16:] in halves]
    logs = [row for row in batch.logs or () if str(row.get("trace_id", ""))[16:] in halves]
    if not spans and not marks and not logs:
        return None
    kept = msgspec.structs.replace(
        batch, spans=spans, marks=marks, logs=logs, open=msgspec.UNSET, windows=msgspec.UNSET
    )
    return Parcel(batch_id, file.path, encode(kept))


def _send(parcel: Parcel, destination: OtlpDestination, outcome: Outcome, patience: float) -> None:
    until = time.monotonic() + patience
    for pause in _pauses():
        before = destination.counts["spans"]
        answer = destination.send(parcel)
        if isinstance(answer, Accepted):
            outcome.batches += 1
            outcome.refused += answer.refused_rows
            outcome.note = outcome.note or answer.note
            return
        if isinstance(answer, Rejected):
            outcome.rejected += 1
            outcome.note = outcome.note or answer.answer
            return
        reason = getattr(answer, "reason", "too large")
        if destination.counts["spans"] > before:
            until = time.monotonic() + patience
        seconds = getattr(answer, "seconds", None)
        pause = pause if seconds is None else seconds  # noqa: PLW2901 - what was asked for
        if time.monotonic() + pause > until:
            raise ReplayError(
                f"{destination.description}: {reason}. Sent until then: "
                f"{destination.counts['spans']:,} spans of {outcome.batches:,} batches. Run it "
                "again when the receiver is well; spans that it has keep their ids."
            )
        time.sleep(pause)


def _pauses() -> Iterator[float]:
    pause = _FIRST_PAUSE_S
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE_S)
