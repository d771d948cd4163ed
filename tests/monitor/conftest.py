"""What needs the existing monitor is run by ``make interop`` only, which installs it."""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("CIRRON_OTEL_TEST_PEER") else ["test_monitor_parity.py"]
