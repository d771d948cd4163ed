"""A full spool: what every destination has leaves first, and what leaves undelivered is counted."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import cirron_otel as ci
from cirron_otel.cursors import Cursor, Delivered
from cirron_otel.spool import Spool
from delivery.platform_server import PlatformServer
from delivery.receivers import until

if TYPE_CHECKING:
    import pytest


def write(spool: Spool, number: int, size: int = 1000) -> str:
    """One file of the spool; returns its name."""
    batch_id = f"{number:032x}"
    spool.write([b"x" * size], created_ns=number, batch_id=batch_id)
    return f"{number:020d}-{batch_id}.json"


def test_delivered_batches_leave_before_older_undelivered_ones(tmp_path: Path) -> None:
    """The newest files are delivered, the oldest are not: the delivered ones leave."""
    cursor = Cursor(tmp_path, "platform")
    assert cursor.take()
    spool = Spool(tmp_path, max_bytes=20_000, evict_order=Delivered(tmp_path, ["platform"]))
    names = [write(spool, number) for number in range(1, 21)]
    for name in names[10:]:
        cursor.settle(name, "sent")
    spool.evict_order = Delivered(tmp_path, ["platform"])  # reads again at once
    for number in range(21, 31):
        write(spool, number)
    left = [path.name for path in spool.files()]
    assert left[:10] == names[:10]
    assert not set(left) & set(names[10:])
    assert (spool.evicted_files, spool.evicted_undelivered) == (10, 0)
    cursor.release()


def test_what_leaves_undelivered_is_counted(tmp_path: Path) -> None:
    """Where nothing is delivered the oldest leave, each counted."""
    spool = Spool(tmp_path, max_bytes=10_000, evict_order=Delivered(tmp_path, ["platform"]))
    names = [write(spool, number) for number in range(1, 16)]
    assert [path.name for path in spool.files()] == names[5:]
    assert (spool.evicted_files, spool.evicted_undelivered) == (5, 5)


def test_without_a_destination_nothing_counts_as_undelivered(tmp_path: Path) -> None:
    """A spool for files alone evicts its oldest, and nothing was to be delivered."""
    spool = Spool(tmp_path, max_bytes=10_000, evict_order=Delivered(tmp_path))
    for number in range(1, 16):
        write(spool, number)
    assert (spool.evicted_files, spool.evicted_undelivered) == (5, 0)


def test_an_outage_longer_than_the_spool_is_told_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that fills its spool while the platform is down warns once and counts the loss."""
    with PlatformServer(default="503") as server:
        monkeypatch.setenv("CIRRON_API_KEY", server.key)
        monkeypatch.setenv("CIRRON_API_ENDPOINT", server.url)
        monkeypatch.setenv("CIRRON_SPOOL_MAX_BYTES", "1000000")
        monkeypatch.setenv("CIRRON_EXIT_BUDGET", "30")
        with caplog.at_level(logging.WARNING):
            profiler = ci.profile(frameworks=[], flush_interval=0.05)

            def fill() -> bool:
                for _ in range(200):
                    with ci.scope("step", text="x" * 200):
                        pass
                ci.flush()
                return bool(ci.health()["losses"].get("evicted_undelivered"))

            until(fill)
            until(lambda: fill() and "spool_max_bytes" in caplog.text, timeout=40)
        lost = ci.health()["losses"]["evicted_undelivered"]
        assert ci.health()["spool_drop_count"] >= lost > 0
        assert sum("leave undelivered" in message for message in caplog.messages) == 1
        server.default = "ok"
        profiler.shutdown()
        spool = sorted(Path(".cirron/spool").glob("*.json"))
        assert set(server.committed) >= {path.stem.rpartition("-")[2] for path in spool}
