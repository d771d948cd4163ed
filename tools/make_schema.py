# ruff: noqa: INP001 - a program, not a module
"""Write the JSON Schema of the spool format, ``docs/formats/spool-v1.schema.json``."""

from __future__ import annotations

import json
from pathlib import Path

from cirron_otel.batch import json_schema

TARGET = Path(__file__).resolve().parent.parent / "docs" / "formats" / "spool-v1.schema.json"


def text() -> str:
    """The file's content, as the types of ``cirron_otel.batch`` make it."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
