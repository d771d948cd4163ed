"""What every test with a framework needs: one thread, for the models are tiny."""

from __future__ import annotations

import os

# As in tests/frameworks: threads of a framework wait for one another on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
