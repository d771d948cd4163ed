"""What every test of a framework hook needs: one thread, for the models are tiny; no snapshots."""

from __future__ import annotations

import os

import pytest

# Read when a framework is loaded, here and in the programs that tests start. On a busy machine the
# threads of a framework wait for one another longer than they work.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _no_snapshots(_clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees are those of the hooks alone; tests/weights sees to the snapshots of frameworks."""
    monkeypatch.setenv("CIRRON_SNAPSHOTS", "off")
