"""Lightning's classes, by name: both packages of it have them in the same places."""

from __future__ import annotations

import sys
from typing import Any

#: What hands values on to the loggers.
CONNECTOR = "trainer.connectors.logger_connector.logger_connector._LoggerConnector"


def find(package: str, path: str) -> Any:  # noqa: ANN401 - a class
    """The class at ``path`` below ``package``, which is imported."""
    module, _, name = path.rpartition(".")
    return getattr(sys.modules[f"{package}.{module}"], name)
