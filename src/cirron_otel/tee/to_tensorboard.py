"""``SummaryWriter.add_scalar`` and ``add_scalars``, of torch and of tensorboardX."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from cirron_otel.tee.copying import flat
from cirron_otel.tee.tees import LIBRARIES
from cirron_otel.tee.wrapping import Tee

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder


def make(rec: Recorder) -> TensorBoardTee:
    """The tee for one recorder, not in place yet."""
    return TensorBoardTee(rec, "tensorboard")


class TensorBoardTee(Tee):
    """See :class:`cirron_otel.tee.wrapping.Tee`."""

    def instrument(self) -> None:
        """Wrap the writers that are there; called again when another one is imported."""
        for name in LIBRARIES["tensorboard"].triggers:
            writer = getattr(sys.modules.get(name), "SummaryWriter", None)
            if writer is not None and writer not in self.owners:
                self.wrap(writer, "add_scalar", _scalar)
                self.wrap(writer, "add_scalars", _scalars)


def _scalar(
    _writer: object,
    tag: str,
    scalar_value: object,
    global_step: object = None,
    *_: object,
    **_more: object,
) -> tuple[Iterable[tuple[str, object]], object]:
    return [(str(tag), scalar_value)], global_step


def _scalars(
    _writer: object,
    main_tag: str,
    tag_scalar_dict: object,
    global_step: object = None,
    *_: object,
    **_more: object,
) -> tuple[Iterable[tuple[str, object]], object]:
    return flat(tag_scalar_dict, f"{main_tag}/"), global_step
