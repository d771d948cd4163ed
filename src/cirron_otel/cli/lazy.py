"""A group of commands whose modules are loaded only when one is run, or asked for its help."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import NamedTuple

import click


class Lazy(NamedTuple):
    """Where a command is, and its line in the list of commands."""

    module: str
    name: str
    short_help: str


class LazyGroup(click.Group):
    """A :class:`click.Group` that knows its commands by name and short help alone."""

    #: Set by whoever makes the group.
    lazy: Mapping[str, Lazy]

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in order."""
        return sorted({*self.lazy, *super().list_commands(ctx)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command itself; loads its module."""
        found = self.lazy.get(cmd_name)
        if found is None:
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(import_module(found.module), found.name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands in the help, without loading any of them."""
        rows = [
            (name, self.lazy[name].short_help)
            for name in self.list_commands(ctx)
            if name in self.lazy
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
