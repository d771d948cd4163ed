"""What every test with a framework needs: one thread, for the models are tiny; nothing watched."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import cirron_otel as ci

# As in tests/frameworks: threads of a framework wait for one another on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _nothing_watched() -> Iterator[None]:
    """Each test begins and ends without a watched model."""
    ci.watch(None)
    yield
    ci.watch(None)
