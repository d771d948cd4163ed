"""The entry point of ``cirron-otel``: says what to install when the extra is missing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status.

    0 done, 1 not found or failed (or nobody reads our output any more), 2 wrong usage (or the
    extra is missing), 130 interrupted.
    """
    if find_spec("click") is None or find_spec("rich") is None:
        print("pip install 'cirron-otel[cli]'", file=sys.stderr)
        return 2
    # Not at the top: it needs click.
    from cirron_otel.cli.app import run  # noqa: PLC0415

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
