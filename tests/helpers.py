"""What tests share: reading a spool back, and showing its span trees as text to compare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess, Popen
from textwrap import dedent
from typing import Protocol

from msgspec import UNSET

import cirron_otel as ci
from cirron_otel import semconv
from cirron_otel.batch import Batch, MarkRecord, SnapshotRecord, SpanRecord, decode


@dataclass(frozen=True)
class Rows:
    """Everything the batch files of one output directory hold, oldest batch first."""

    batches: list[Batch] = field(default_factory=list)

    @property
    def spans(self) -> list[SpanRecord]:
        """The closed spans."""
        return [span for batch in self.batches for span in batch.spans]

    @property
    def marks(self) -> list[MarkRecord]:
        """The marks of all spans, in the order they were written."""
        return [mark for batch in self.batches for mark in batch.marks]

    @property
    def snapshots(self) -> list[SnapshotRecord]:
        """The snapshots of all spans."""
        return [snapshot for batch in self.batches for snapshot in batch.snapshots]

    @property
    def windows(self) -> list[SpanRecord]:
        """The root spans of window traces; they are no part of the canonical tree."""
        return [span for b in self.batches if b.windows is not UNSET for span in b.windows]

    @property
    def open(self) -> list[SpanRecord]:
        """The scopes that each writer's newest word on the matter calls open."""
        newest = {b.writer: b.open for b in self.batches if b.open is not UNSET}
        closed = {span.id for span in self.spans}
        return [span for spans in newest.values() for span in spans if span.id not in closed]

    def named(self, name: str) -> list[SpanRecord]:
        """The closed spans of this name, by start."""
        return sorted((s for s in self.spans if s.name == name), key=lambda s: s.start_ns)

    def one(self, name: str) -> SpanRecord:
        """The only closed span of this name; fails the test when there is none or several."""
        found = self.named(name)
        assert len(found) == 1, f"{len(found)} spans are named {name!r}, not one"
        return found[0]

    def children(self, parent: SpanRecord) -> list[SpanRecord]:
        """The closed spans right under this one, by start."""
        return sorted((s for s in self.spans if s.parent_id == parent.id), key=lambda s: s.start_ns)

    def marks_of(self, span: SpanRecord) -> list[MarkRecord]:
        """The marks of one span, by time."""
        return sorted((m for m in self.marks if m.span_id == span.id), key=lambda m: m.ts_ns)


@dataclass(frozen=True)
class ProgramRun(Rows):
    """A finished program and what it left in the spool."""

    completed: CompletedProcess[str] = field(default_factory=lambda: CompletedProcess([], 0))
    output_dir: Path = Path(".cirron")

    @property
    def stdout(self) -> str:
        """What the program printed."""
        return self.completed.stdout

    @property
    def stderr(self) -> str:
        """What the program, or Python on its behalf, complained about."""
        return self.completed.stderr


def read_batches(output_dir: Path) -> list[Batch]:
    """The batch files of an output directory, oldest first. A file that is no batch fails here."""
    return [decode(file.read_bytes()) for file in sorted(output_dir.glob("spool/*.json"))]


def read_spool(output_dir: Path | str = ".cirron") -> Rows:
    """What is in the spool of an output directory; nothing when there is none."""
    return Rows(read_batches(Path(output_dir)))


def finished(losses: Mapping[str, int] | None = None) -> Rows:
    """Shut down, check that nothing was swallowed or, but for ``losses``, lost, and read back."""
    health = ci.health()
    assert health["losses"] == (losses or {})
    assert health["swallowed_errors"] == {}
    assert ci.shutdown()
    return read_spool()


def tree_text(
    rows: Rows,
    *,
    marks: bool = False,
    attrs: Collection[str] = (),
    without: Collection[str] = (),
    startup: bool = False,
) -> str:
    """The span trees as indented lines ``name[index]``, siblings by start, for comparing.

    ``marks=True`` adds the names of a span's marks (but for those that are made for metrics, by the
    clock), ``attrs`` the named attributes where a span has them; spans named in
    ``without`` are left out with all below them, and ``startup`` unless it is asked for. A span
    whose parent is in no file stands at the left edge and says so, one that never ended says
    ``(open)``.
    """
    without = without if startup else {*without, semconv.STARTUP}
    still_open = {span.id for span in rows.open}
    spans = [*rows.spans, *rows.open]
    known = {span.id for span in spans}
    assert len(known) == len(spans), "two span rows have one id"
    below: dict[str | None, list[SpanRecord]] = {}
    for span in sorted(spans, key=lambda s: s.start_ns):
        below.setdefault(span.parent_id if span.parent_id in known else None, []).append(span)

    mark_names: dict[str, dict[str, None]] = {}
    for mark in rows.marks if marks else ():
        if mark.name in semconv.FOR_METRICS:
            continue
        mark_names.setdefault(mark.span_id, {})[mark.name] = None
    lines: list[str] = []
    stack = [(0, False, span) for span in reversed(below.get(None, ()))]
    shown = 0
    while stack:
        depth, hidden, span = stack.pop()
        shown += 1
        hidden = hidden or span.name in without
        if not hidden:
            line = "  " * depth + _label(span, attrs, mark_names.get(span.id, ()))
            line += " (open)" if span.id in still_open else ""
            lines.append(line + (" (parent missing)" if depth == 0 and span.parent_id else ""))
        stack += [(depth + 1, hidden, child) for child in reversed(below.get(span.id, ()))]
    assert shown == len(spans), "spans that are each other's ancestors were left out"
    return "\n".join(lines)


def _label(span: SpanRecord, attrs: Collection[str], mark_names: Collection[str]) -> str:
    parts = [span.name if span.index is None else f"{span.name}[{span.index}]"]
    parts += [f"{key}={json.dumps(span.attrs[key])}" for key in attrs if key in span.attrs]
    if mark_names:
        parts.append("{" + ", ".join(mark_names) + "}")
    return " ".join(parts)


_TWO_RANKS = """
import os, socket, subprocess, sys

if len(sys.argv) > 1:
    train()
else:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "train"],
            env={
                **os.environ,
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            },
        )
        for rank in range(2)
    ]
    sys.exit(max(rank.wait() for rank in ranks))
"""


def on_two_ranks(source: str) -> str:
    """A program that runs ``train()`` of ``source`` in two processes, started as torchrun does."""
    return dedent(source) + _TWO_RANKS


class RunProgram(Protocol):
    """The type of the fixture ``run_program``."""

    def __call__(
        self,
        source: str,
        env: Mapping[str, str] | None = None,
        *,
        args: Sequence[str] = (),
        expect: int | None = 0,
        timeout: float = 50,
        measured: bool = True,
    ) -> ProgramRun:
        """Run the program text; ``expect=None`` takes any exit status."""


def opentelemetry_instrument(
    program: Path, *, timeout: float, **variables: str
) -> CompletedProcess[str]:
    """Run ``program`` under OpenTelemetry's command, which prints the spans, with ``variables``."""
    return subprocess.run(
        [Path(sys.executable).parent / "opentelemetry-instrument", sys.executable, program],
        env={
            **os.environ, "PYTHONPATH": str(Path(ci.__file__).parents[1]),
            "OTEL_TRACES_EXPORTER": "console", "OTEL_METRICS_EXPORTER": "none",
            "OTEL_LOGS_EXPORTER": "none", **variables,
        },
        capture_output=True, text=True, timeout=timeout, check=True,
    )  # fmt: skip


#: The type of the fixture ``start_program``: the program text and, if need be, its environment.
StartProgram = Callable[..., Popen[str]]
