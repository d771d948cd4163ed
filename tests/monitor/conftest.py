"""What needs the existing monitor is run by ``make interop`` only, which installs it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

collect_ignore = [] if os.environ.get("CIRRON_OTEL_TEST_PEER") else ["test_monitor_parity.py"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models here are tiny: a second thread only waits for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
