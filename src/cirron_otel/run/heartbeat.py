"""What the ranks of a run tell each other through the directory they share: where each one is.

A small file a rank, replaced a few times a minute by its flush thread; read only by a rank that has
found that nothing moves. Ranks that share no directory know nothing of each other. How old a word
is the directory says: the clocks of nodes may be minutes apart, or be set meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cirron_otel import run_state
from cirron_otel.run.closing import clock
from cirron_otel.run_state import state_file

#: Seconds between two beats; one that is older than three of them and a minute counts as gone.
INTERVAL_S = 5.0
_GONE_S = 60.0
_SUFFIX = ".beat"


class Beat(msgspec.Struct):
    """Where a rank was at ``time_ns``. ``since_ns``: its last movement; both since the epoch.

    As :func:`read` returns it, ``time_ns`` is when the file was written, by the directory's clock.
    """

    run_id: str
    rank: int
    attempt: int
    host: str
    pid: int
    iteration: int
    time_ns: int
    since_ns: int
    where: str = ""
    #: It stands where ranks wait for each other.
    waits: bool = False
    #: How it ended, where it did.
    outcome: str = ""


def write(directory: Path, beat: Beat) -> None:
    """Replace this rank's file; atomic, silent where the directory cannot be written."""
    path = state_file(directory, beat.run_id, beat.rank, _SUFFIX)
    run_state.replace(path, msgspec.json.encode(beat))


def read(directory: Path, run_id: str, world_size: int) -> list[Beat]:
    """The newest beat of each rank that has written one, by rank."""
    beats = []
    for rank in range(world_size):
        path = state_file(directory, run_id, rank, _SUFFIX)
        beat = run_state.read(path, Beat, run_id)
        if beat is not None:
            with contextlib.suppress(OSError):
                beat.time_ns = path.stat().st_mtime_ns
            beats.append(beat)
    return beats


def culprits(beats: Sequence[Beat], now_ns: int) -> tuple[list[Beat], str]:
    """The ranks that do not move while the others wait for them, and why, in a few words.

    Ended or silent ranks first; else those that are behind in iterations; else those that do not
    stand where ranks wait for each other. None where all wait for each other.
    """
    ended = [beat for beat in beats if beat.outcome]
    if ended and len(ended) < len(beats):
        return ended, f"ended ({', '.join(sorted({beat.outcome for beat in ended}))})"
    gone = [beat for beat in beats if now_ns - beat.time_ns > _GONE_S * 1e9]
    if gone and len(gone) < len(beats):
        oldest = min(beat.time_ns for beat in gone)
        return gone, f"not heard of for {clock((now_ns - oldest) / 1e9)}"
    if beats and min(beat.iteration for beat in beats) < max(beat.iteration for beat in beats):
        least = min(beat.iteration for beat in beats)
        return [beat for beat in beats if beat.iteration == least], f"at iteration {least}"
    moving = [beat for beat in beats if not beat.waits]
    if moving and len(moving) < len(beats):
        return moving, ""
    return [], ""


def described(beats: Sequence[Beat], world_size: int, now_ns: int) -> str:
    """Who waits and who does not move, in a clause; empty where nothing is known of the others."""
    if len(beats) < 2:  # noqa: PLR2004 - this rank alone
        return ""
    found, why = culprits(beats, now_ns)
    if not found:
        return "all ranks stand where they wait for each other"
    ranks = {beat.rank for beat in found}
    waiting = [beat.rank for beat in beats if beat.rank not in ranks]
    parts = [
        f"rank {beat.rank} on {beat.host} does not move"
        + (f" ({why})" if why else "")
        + (f", in {beat.where}" if beat.where and not beat.outcome else "")
        for beat in found
    ]
    parts.append(f"{_ranks(waiting)} for it" if len(found) == 1 else f"{_ranks(waiting)} for them")
    unknown = world_size - len(beats)
    if unknown:
        parts.append(f"of {unknown} nothing is known")
    return "; ".join(parts)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")  # noqa: PLR2004
    return f"rank {shown} waits" if len(ranks) == 1 else f"ranks {shown} wait"
