"""What is said of a tensor's values: the numbers, their definition, their form in the spool.

No library of tensors is known here: ``reductions_*.py`` reduce a tensor to a :class:`Reduced`, each
in its own way and all to the same numbers; :func:`describe` makes of it what users see.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from cirron_otel.values import nonfinite_name

#: Bins of every histogram.
BINS = 16
_INNER = range(1, BINS)


class Reduced(NamedTuple):
    """What one pass over a tensor tells; of the finite values but for the three counts.

    ``finite`` finite values, ``nans``, ``pos_infs`` and ``neg_infs`` others. Without a finite value
    the numbers are 0 and ``counts`` is None, which it also is where no histogram was asked for.
    """

    finite: int
    nans: int
    pos_infs: int
    neg_infs: int
    lo: float
    hi: float
    mean: float
    std: float
    norm: float
    counts: tuple[int, ...] | None


NOTHING = Reduced(0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, None)


class Histogram(msgspec.Struct, frozen=True, gc=False):
    """How many values lie in each of 16 bins of equal width over ``[lo, hi]``.

    Bin ``i`` holds the values from edge ``i`` up to, not including, edge ``i + 1``; the last holds
    its upper edge too. Where ``lo == hi`` the range is ``[lo, lo + 1]`` and bin 0 holds all.
    """

    lo: float
    hi: float
    counts: tuple[int, ...]

    @property
    def bins(self) -> list[float]:
        """The 17 edges, rising; all 0 where there is nothing to count."""
        return edges(self.lo, self.hi) if any(self.counts) else [0.0] * (BINS + 1)


class Finite(msgspec.Struct, frozen=True, gc=False):
    """The numbers of the finite values of a tensor that has others too. ``norm`` may be inf."""

    count: int
    mean: float
    std: float
    min: float
    max: float
    norm: float
    histogram: Histogram | None


class TensorStats(msgspec.Struct, frozen=True, gc=False):
    """The numbers of one tensor (of this process's part of it, where it is sharded).

    ``mean`` is arithmetic, ``std`` that of the population (divided by the number of values),
    ``norm`` the square root of the sum of squares. Where a value is NaN or infinite these are what
    IEEE arithmetic makes of it, ``nonfinite_count`` says of how many, and ``finite`` describes the
    rest (None where there is no rest). ``histogram`` is None where an end of its range is not
    finite, or where none was asked for.

    ``dtype`` is spelled as in ``torch.float32`` without the ``torch.``; ``shape`` is that of what
    was described; ``attrs`` tells of a sharded tensor how it is placed.
    """

    dtype: str
    shape: tuple[int, ...]
    mean: float
    std: float
    min: float
    max: float
    norm: float
    histogram: Histogram | None
    nonfinite_count: int = 0
    finite: Finite | None = None
    attrs: dict[str, Any] = {}

    @property
    def numel(self) -> int:
        """How many values were described."""
        return math.prod(self.shape)


class Skipped(msgspec.Struct, frozen=True, gc=False):
    """A tensor of which there is nothing to say. ``reason`` is a name to count by.

    ``sparse``, ``meta``, ``fake``, ``complex``, ``quantized``, ``uninitialized``, ``no_storage``
    (its memory was freed, as FSDP does between uses), ``dtype`` (one that has no values to
    describe, such as packed 4-bit numbers), ``nested``, ``capture`` (a CUDA graph is being
    captured), ``not_a_tensor`` or ``error``; ``detail`` says more for a person.
    """

    reason: str
    detail: str = ""


def edges(lo: float, hi: float) -> list[float]:
    """The 17 edges of 16 equal bins over ``[lo, hi]``, rising, the ends exact.

    This definition is law: every implementation counts by comparing with these doubles.
    """
    if lo == hi:
        hi = lo + 1
    width = (hi - lo) / BINS
    if not math.isfinite(width):  # hi - lo is beyond a double
        width = hi / BINS - lo / BINS
    inner = [lo + k * width for k in _INNER]
    if inner[-1] > hi:  # by rounding; they rise, so where the last is not beyond, none is
        inner = [min(edge, hi) for edge in inner]
    return [lo, *inner, hi]


def scale_exponent(lo: float, hi: float) -> int:
    """By which power of two to divide values so that squares neither overflow nor vanish.

    Zero for every range that single precision knows.
    """
    exponent = math.frexp(max(abs(lo), abs(hi)))[1]
    return 0 if -400 < exponent < 400 else max(-1000, min(exponent, 1000))  # noqa: PLR2004


def scaled(value: float, exponent: int) -> float:
    """``value * 2**exponent``, infinite where that is beyond a double."""
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.copysign(math.inf, value)


class Sums:
    """Mean and sum of squared distances of values that come in pieces.

    Merged as Chan, Golub and LeVeque do, "Algorithms for Computing the Sample Variance", 1983.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.m2 = 0.0

    def add(self, count: int, mean: float, m2: float) -> None:
        """Another piece, not empty."""
        both = self.count + count
        away = mean - self.mean
        self.mean += away * (count / both)
        self.m2 += m2 + away * away * (self.count * (count / both))
        self.count = both


def finish(  # noqa: PLR0913, PLR0917 - what the sums of a tensor are
    odd: tuple[int, int, int],
    count: int,
    lo: float,
    hi: float,
    mean: float,
    m2: float,
    exponent: int,
    counts: Sequence[int] | None,
) -> Reduced:
    """The numbers of sums taken over values that were divided by ``2**exponent``.

    ``odd`` counts NaN, inf and -inf; ``m2`` is the sum of squared distances from ``mean``.
    """
    nans, pos_infs, neg_infs = odd
    if count == 0:
        return NOTHING._replace(nans=nans, pos_infs=pos_infs, neg_infs=neg_infs)
    norm = scaled(math.sqrt(m2 + count * mean * mean), exponent)
    if lo == hi:
        mean, std = lo, 0.0
        if counts is not None:  # of a large value every edge may be the value: lo + 1 == lo
            counts = (count, *[0] * (BINS - 1))
    else:
        mean = min(max(scaled(mean, exponent), lo), hi)
        std = scaled(math.sqrt(m2 / count), exponent)
    bins = None if counts is None else tuple(counts)
    return Reduced(count, nans, pos_infs, neg_infs, lo + 0.0, hi + 0.0, mean + 0.0, std, norm, bins)


def describe_empty(
    dtype: str, shape: Sequence[int], attrs: dict[str, Any], *, histogram: bool
) -> TensorStats:
    """The numbers of a tensor without values: zero, as is the histogram."""
    reduced = NOTHING._replace(counts=(0,) * BINS if histogram else None)
    return describe(reduced, dtype, shape, attrs)


def describe(
    reduced: Reduced,
    dtype: str,
    shape: Sequence[int],
    attrs: dict[str, Any] | None = None,
) -> TensorStats:
    """The numbers users see."""
    count, nans, pos_infs, neg_infs, lo, hi, mean, std, norm, counts = reduced
    bad = nans + pos_infs + neg_infs
    shape, attrs = tuple(shape), attrs or {}
    if not bad:
        histogram = None if counts is None else Histogram(lo, hi, counts)
        return TensorStats(dtype, shape, mean, std, lo, hi, norm, histogram, 0, None, attrs)
    finite = None
    if count:
        histogram = None if counts is None else Histogram(lo, hi, counts)
        finite = Finite(count, mean, std, lo, hi, norm, histogram)
    if nans:
        all_min = all_max = all_mean = all_norm = math.nan
    else:
        all_norm = math.inf
        all_min = -math.inf if neg_infs else (lo if count else math.inf)
        all_max = math.inf if pos_infs else (hi if count else -math.inf)
        both = pos_infs and neg_infs
        all_mean = math.nan if both else (math.inf if pos_infs else -math.inf)
    return TensorStats(
        dtype, shape, all_mean, math.nan, all_min, all_max, all_norm, None, bad, finite, attrs
    )


def to_record(stats: TensorStats) -> dict[str, Any]:
    """The ``stats`` object of a row of ``snapshots[]``: strict JSON, see docs/formats/spool-v1.md.

    A number that is not finite is null and named in ``nonfinite``.
    """
    record = _numbers(stats)
    if stats.nonfinite_count:
        record["nonfinite_count"] = stats.nonfinite_count
        finite = stats.finite
        record["finite"] = (
            {"count": 0} if finite is None else {"count": finite.count, **_numbers(finite)}
        )
    return record


def _numbers(stats: TensorStats | Finite) -> dict[str, Any]:
    record: dict[str, Any] = {
        "mean": stats.mean,
        "std": stats.std,
        "min": stats.min,
        "max": stats.max,
        "norm": stats.norm,
    }
    if stats.histogram is not None:
        record["histogram"] = {
            "bins": stats.histogram.bins,
            "counts": list(stats.histogram.counts),
        }
    if not math.isfinite(stats.norm + stats.mean + stats.std + stats.min + stats.max):
        odd = {name: nonfinite_name(value) for name, value in record.items() if _is_float(value)}
        odd = {name: found for name, found in odd.items() if found is not None}
        if odd:  # finite numbers may have an infinite sum
            record.update(dict.fromkeys(odd))
            record["nonfinite"] = odd
    return record


def _is_float(value: object) -> bool:
    return isinstance(value, float)
