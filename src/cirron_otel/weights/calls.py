"""``ci.snapshot`` and ``ci.snapshots``: taking one by hand, and reading them all back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cirron_otel import recorder
from cirron_otel._guard import logger
from cirron_otel.errors import CirronDependencyError, SpoolError
from cirron_otel.spool import Spool
from cirron_otel.weights import choosing, policy
from cirron_otel.weights.taking import Snapshots

if TYPE_CHECKING:
    import pandas as pd

    from cirron_otel.watching import WatchedModel


def snapshot(
    model: Any = None,  # noqa: ANN401 - of any framework
    *,
    name: str | None = None,
    mode: str | None = None,
    buffers: bool | None = None,
) -> str | None:
    """Look at a model's weights, and at the gradients it has, now.

    Without ``model`` at all that are watched, or that a framework trains or has trained. ``name``
    labels the snapshot; ``mode`` (``"stats"``, ``"sampled"``, ``"full"``) overrides the
    recording's, ``buffers=True`` takes buffers too. The rows, and the files ``snapshots/<id>/``,
    belong to a ``snapshot`` scope under the current one.

    Returns that scope's id; None where nothing was taken: no recording, ``snapshots=None``, a
    ``profile(enabled=False)``, or no model. Blocks until the statistics are made and the files are
    written. On the thread that changes the model; never raises.
    """
    rec = recorder._current  # noqa: SLF001
    if rec is None or not rec.active:
        return None
    try:
        chosen = policy.mode_of(mode)
        if mode is not None and chosen is None:
            rec.guard.warn(
                f"snapshot mode {mode!r}",
                f"ci.snapshot(mode={mode!r}): choose 'stats', 'sampled' or 'full'; the setting of "
                "profile() is used",
            )
        if rec.snapshots is None:  # in a child process, which no profile() has started
            rec.snapshots = Snapshots(rec)
        taker: Snapshots = rec.snapshots
        label = None if name is None else str(name)
        return taker.by_hand(_chosen(model, buffers), label, chosen)
    except Exception as error:  # noqa: BLE001 - see _guard
        rec.guard.swallow("snapshot", error)
        return None


def _chosen(model: object, buffers: bool | None) -> list[WatchedModel]:  # noqa: FBT001
    """The model, under the name it is watched by where it is; or all that are known."""
    entries = choosing.all_known() if model is None else choosing.given(model)
    if buffers is not None:
        entries = [one._replace(buffers=bool(buffers)) for one in entries]
    return entries


def snapshots(
    path: str | os.PathLike[str] | None = None, *, session: str | None = None
) -> pd.DataFrame:
    """Every snapshot row of an output directory as a pandas DataFrame, oldest first.

    ``path`` is the directory (default: that of the recording, else ``$CIRRON_OUTPUT_DIR``, else
    ``./.cirron``), ``session`` the beginning of a session's id. One row per tensor and snapshot,
    with ``session``, ``rank``, ``span``, ``epoch``, ``iteration``, ``trigger``, ``name``,
    ``time``, ``kind``, ``tensor``, ``shape``, ``dtype``, ``mode``, ``mean``, ``std``, ``min``,
    ``max``, ``norm``, ``nonfinite``, ``bins``, ``counts``, ``skipped``, ``blob_uri``.

    Flushes the recording first. Raises :class:`~cirron_otel.errors.CirronDependencyError` where
    pandas is not installed, :class:`~cirron_otel.errors.SpoolError` where there is no spool.
    """
    try:
        import pandas as pd  # noqa: PLC0415 - only who asks for a DataFrame needs it
    except ImportError as exc:
        raise CirronDependencyError(
            "ci.snapshots() makes a pandas DataFrame, and pandas is not installed: "
            "pip install 'cirron-otel[snapshots]'; `cirron-otel traces snapshots` works without"
        ) from exc
    from cirron_otel.weights import reading  # noqa: PLC0415 - as above

    rec = recorder._current  # noqa: SLF001
    if path is not None:
        root = Path(path).expanduser()
        root = root.parent if root.name == "spool" and not (root / "spool").is_dir() else root
    elif rec is not None:
        root = rec.spool.root
    else:
        root = Path(os.environ.get("CIRRON_OUTPUT_DIR") or ".cirron")
    if rec is not None:
        rec.flush()
    spool = Spool(root)
    if not spool.directory.is_dir():
        raise SpoolError(f"no spool in {root}: nothing was recorded there yet")

    def passed_over(file: Path, error: Exception) -> None:
        logger.warning("cirron-otel: skipped %s: %s", file.name, error)

    table = reading.table(reading.load(spool, session=session, on_error=passed_over))
    frame = pd.DataFrame(table, columns=reading.COLUMNS)
    frame["time"] = pd.to_datetime(frame["time"], unit="ns", utc=True)
    frame["epoch"] = frame["epoch"].astype("Int64")
    frame["iteration"] = frame["iteration"].astype("Int64")
    return frame
