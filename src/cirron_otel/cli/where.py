"""Which spool a command means."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from cirron_otel.errors import SpoolError
from cirron_otel.spool import Spool

_DEFAULT = ".cirron"
_VARIABLE = "CIRRON_OUTPUT_DIR"
_F = TypeVar("_F", bound=Callable[..., Any])


def spool_option_as(*names: str) -> Callable[[_F], _F]:
    """The option ``directory`` of a command that reads a spool, for :func:`find_spool`.

    Each of ``names`` will do.
    """
    return click.option(
        *names,
        "directory",
        metavar="DIR",
        help="The output directory or its spool folder [$CIRRON_OUTPUT_DIR, ./.cirron].",
    )


spool_option = spool_option_as("--spool", "--dir")


def find_spool(given: str | None, option: str) -> Spool:
    """The spool of an output directory, named itself, by its ``spool`` folder, or by where it lies.

    Without a name: ``$CIRRON_OUTPUT_DIR``, else ``./.cirron``. Raises
    :class:`~cirron_otel.errors.SpoolError` when there is none, and says how to get one.
    """
    named = given or os.environ.get(_VARIABLE) or _DEFAULT
    root = Path(named).expanduser()
    if not (root / "spool").is_dir():
        if root.name == "spool" and root.is_dir():
            root = root.parent
        elif (root / _DEFAULT / "spool").is_dir():
            root /= _DEFAULT
    spool = Spool(root)
    if spool.directory.is_dir():
        return spool
    if not root.exists():
        what = "there is no such directory"
    elif not root.is_dir():
        what = "it is not a directory"
    else:
        what = "it holds no folder 'spool'"
    raise SpoolError(
        f"no spool in {named}: {what}. Nothing was recorded there yet: call "
        "`cirron_otel.profile()` in a program that runs in this directory, or say where it wrote "
        f"with {option} DIR or {_VARIABLE}."
    )
