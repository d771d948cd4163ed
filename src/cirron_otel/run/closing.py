"""The table at the end of a training: what the hours went into. Pure."""

from __future__ import annotations

from collections.abc import Mapping

_WORDS = {
    "startup": "imports, model, data set",
    "compile": "compiling",
    "data": "waiting for data",
    "compute": "training steps",
    "collective_wait": "waiting for other ranks",
    "checkpoint": "writing and reading checkpoints",
    "evaluation": "evaluation and prediction",
    "stalled": "nothing moved",
    "lost": "done again by a later attempt",
    "other": "between the steps",
}


def table(
    times: Mapping[str, float], *, outcome: str, steps: int, title: str = "this run"
) -> list[str]:
    """Lines for a terminal; ``times`` in s by category. Categories without time are left out."""
    wall = sum(times.values())
    lines = [f"{title}: {outcome} after {clock(wall)}, {steps:,} training steps"]
    for name, length in times.items():
        if length >= 0.0005 * wall or length >= 1:
            share = f"{length / wall:6.1%}" if wall else ""
            lines.append(
                f"  {name:<16}{clock(length):>10} {share}  {_WORDS.get(name, '')}".rstrip()
            )
    good = times.get("compute", 0.0)
    if wall:
        lines.append(f"  goodput {good / wall:.1%}: training steps as a share of the wall time")
    return lines


def clock(seconds: float) -> str:
    """A length as people read it: ``0.42 s``, ``1:02``, ``3:25:10``."""
    if seconds < 60:  # noqa: PLR2004 - a minute
        return f"{seconds:.3g} s" if seconds < 10 else f"{seconds:.1f} s"  # noqa: PLR2004
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{whole % 60:02d}"
    return f"{minutes}:{whole % 60:02d}"
