"""``Accelerator.log``, whatever trackers it hands on to."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from cirron_otel.tee.copying import flat
from cirron_otel.tee.wrapping import Tee

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder


def make(rec: Recorder) -> AccelerateTee:
    """The tee for one recorder, not in place yet."""
    return AccelerateTee(rec, "accelerate")


class AccelerateTee(Tee):
    """See :class:`cirron_otel.tee.wrapping.Tee`."""

    def instrument(self) -> None:
        """Wrap the methods that talk to trackers."""
        accelerator = sys.modules["accelerate.accelerator"].Accelerator
        self.wrap(accelerator, "log", _values)
        for name in ("init_trackers", "end_training"):
            self.wrap(accelerator, name)


def _values(
    _accelerator: object, values: object, step: object = None, *_: object, **_more: object
) -> tuple[Iterable[tuple[str, object]], object]:
    return flat(values), step
