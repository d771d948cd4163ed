"""How long whoever was refused pauses before the next try, and which refusals are about whom."""

from __future__ import annotations

from random import Random

#: Answers that speak of the receiver, or of the way there, and not of what was sent.
ABOUT_THE_RECEIVER = frozenset({408, 425, 429, 502, 503, 504})
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
#: What a receiver may ask for at most: an hour's outage must not become a day's.
_LONGEST_ASKED_S = 300.0


def back_off_s(failures: int, jitter: Random) -> float:
    """The pause, in seconds, after so many failures in a row (1 or more): longer each time."""
    longest = min(_FIRST_PAUSE_S * 2.0 ** min(failures - 1, 10), _LONGEST_PAUSE_S)
    return longest * jitter.uniform(0.5, 1.0)


def asked_s(seconds: float, jitter: Random) -> float:
    """The pause, in seconds, where the receiver asks for one, within bounds and no shorter."""
    return min(max(seconds, 0.0), _LONGEST_ASKED_S) * jitter.uniform(1.0, 1.1)
