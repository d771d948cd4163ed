"""What a loop's batches hold: tokens and samples, counted by what the program gives to count them.

A count is a mark on the step (or micro batch) once its body is done; a count that lies on a device
is read later, as every mark is. Counting never raises into the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cirron_otel import semconv

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder

#: Takes a batch as the loop gets it, returns a number (of any library, on any device).
Count = Callable[[Any], Any]
_MAX_DEPTH = 4


class BatchCounts:
    """The counts of one loop. On its thread; guarded by who calls."""

    def __init__(self, rec: Recorder, tokens: Count | None, samples: Count | None) -> None:
        self._rec = rec
        self._wanted = {semconv.SAMPLES: samples or samples_of}
        if tokens is not None:
            self._wanted[semconv.TOKENS] = tokens
        self._found: list[tuple[str, Any]] = []

    def count(self, item: Any) -> None:  # noqa: ANN401 - any batch
        """Look at a batch, before the program may change it."""
        self._found = []
        for name, wanted in tuple(self._wanted.items()):
            try:
                value = wanted(item)
            except Exception as error:  # noqa: BLE001 - the program's function, not its loop
                del self._wanted[name]
                self._rec.guard.warn(
                    f"count_{name}",
                    f"ci.batches({name}=...) raised {error!r}; {name} of this loop are not counted",
                )
            else:
                if value is not None:
                    self._found.append((name, value))

    def mark(self) -> None:
        """The body of the batch is done: record what it held, on the current scope."""
        found, self._found = self._found, []
        for name, value in found:
            self._rec.mark(name, value, "point", {})


def counts_of(rec: Recorder, tokens: object, samples: object) -> BatchCounts | None:
    """What counts, or None where nothing is to be counted; what is no function is warned of."""
    for name, given in (("tokens", tokens), ("samples", samples)):
        if given is not None and not callable(given):
            rec.guard.warn(
                f"count_{name}_by",
                f"ci.batches({name}=) takes a function from a batch to a number, not "
                f"{type(given).__name__}; {name} are not counted",
            )
    count_tokens = tokens if callable(tokens) else None
    count_samples = samples if callable(samples) else None
    if count_tokens is None and count_samples is None:
        return None
    return BatchCounts(rec, count_tokens, count_samples)


def samples_of(item: Any, depth: int = 0) -> int | None:  # noqa: ANN401 - any batch
    """The length of the first array or tensor in a batch, along its first dimension; else None."""
    shape = getattr(item, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    if depth >= _MAX_DEPTH:
        return None
    if isinstance(item, Mapping):
        inside: Any = item.values()
    elif isinstance(item, (list, tuple)):
        inside = item
    else:
        return None
    counts = (samples_of(one, depth + 1) for one in inside)
    return next((count for count in counts if count is not None), None)
