"""What is kept of a snapshot: its statistics, or the tensors too."""

from __future__ import annotations

import hashlib
from typing import Literal, cast

Mode = Literal["stats", "sampled", "full"]
MODES = ("stats", "sampled", "full")


def mode_of(given: object) -> Mode | None:
    """A mode as a caller writes it; None for what is none."""
    return cast("Mode", given) if isinstance(given, str) and given in MODES else None


def writes_tensors(mode: Mode, rate: float, *moment: object) -> bool:
    """Whether a snapshot's tensors are written.

    ``sampled`` throws a die of its own for each moment (run, epoch, step, name): the same on every
    rank of a job and whenever the run is repeated under the same id, and no random numbers of the
    program are used up.
    """
    if mode != "sampled":
        return mode == "full"
    text = "\0".join(map(str, moment)).encode("utf-8", "backslashreplace")
    drawn = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
    return drawn < rate * 2**64
