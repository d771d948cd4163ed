"""Histograms as text: sixteen characters in a table, or bars one below the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_BLOCKS = " ▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = " .:-=+*%#"
_EIGHTHS = "▏▎▍▌▋▊▉█"


def spark(counts: Sequence[int], *, ascii_only: bool = False) -> str:
    """One character a bin, as high as its count against the highest; no count at all is blank."""
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    highest = max(counts, default=0)
    if highest <= 0:
        return blocks[0] * len(counts)
    top = len(blocks) - 1
    # A bin with anything in it is never blank.
    return "".join(blocks[-(-count * top // highest) if count > 0 else 0] for count in counts)


def bars(
    bins: Sequence[float], counts: Sequence[int], *, columns: int = 40, ascii_only: bool = False
) -> Iterator[str]:
    """A line for each bin: its edges, a bar, its count and share of all."""
    total = sum(counts) or 1
    highest = max(counts, default=0) or 1
    edges = [f"{edge:.4g}" for edge in bins]
    width = max(map(len, edges))
    number = max(len(f"{count:,}") for count in counts)
    last = len(counts) - 1
    for i, count in enumerate(counts):
        bar = _bar(count * columns / highest, ascii_only=ascii_only)
        close = "]" if i == last else ")"
        yield (
            f"[{edges[i]:>{width}}, {edges[i + 1]:>{width}}{close} {bar:<{columns}} "
            f"{count:>{number},}  {count / total:6.2%}"
        )


def _bar(length: float, *, ascii_only: bool) -> str:
    if length <= 0:
        return ""
    if ascii_only:
        return "#" * max(1, round(length))
    whole = int(length)
    part = int((length - whole) * 8)
    shown = _EIGHTHS[-1] * whole + (_EIGHTHS[part - 1] if part else "")
    return shown or _EIGHTHS[0]
