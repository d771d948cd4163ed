"""What every test of a framework hook needs: one thread, for the models are tiny."""

from __future__ import annotations

import os

# Read when a framework is loaded, here and in the programs that tests start. On a busy machine the
# threads of a framework wait for one another longer than they work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
