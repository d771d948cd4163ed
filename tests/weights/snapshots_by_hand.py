"""What the tests of snapshots share: reading back what was taken, and what commands print."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner

import cirron_otel as ci
from cirron_otel import semconv
from cirron_otel.batch import SnapshotRecord, SpanRecord
from cirron_otel.cli.app import cli
from cirron_otel.errors import CirronError
from cirron_otel.weights import containers
from cirron_otel.weights.tensors import dtype_name
from helpers import Rows, read_spool


def finished() -> Rows:
    """Shut down, check that nothing was lost or swallowed, and read the spool."""
    health = ci.health()
    assert (health["losses"], health["swallowed_errors"]) == ({}, {})
    assert ci.shutdown()
    return read_spool()


def of_span(rows: Rows, span: SpanRecord) -> list[SnapshotRecord]:
    """The rows of one snapshot."""
    return [row for row in rows.snapshots if row.span_id == span.id]


def taken(rows: Rows) -> list[tuple[str, int | None, list[str]]]:
    """Each snapshot: what made it, its epoch, and its tensors."""
    return [
        (
            span.attrs[semconv.SNAPSHOT_TRIGGER],
            span.attrs.get(semconv.EPOCH_INDEX),
            [row.tensor_name for row in of_span(rows, span)],
        )
        for span in rows.named(semconv.SNAPSHOT)
    ]


def files() -> list[Path]:
    """Every file under ``snapshots/``."""
    return sorted(path for path in Path(".cirron/snapshots").rglob("*") if path.is_file())


def part(name: str, tensor: torch.Tensor) -> containers.Part:
    """A tensor to be written."""
    made = containers.part_of(name, tensor, dtype_name(tensor))
    assert made is not None
    return made


def quantised() -> torch.Tensor:
    """A tensor of a kind that torch itself calls outdated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def shown(*arguments: str, status: int = 0) -> str:
    """What a command under ``traces`` prints."""
    done = CliRunner().invoke(cli, ["traces", *arguments], catch_exceptions=bool(status))
    if status:
        assert done.exit_code == status or isinstance(done.exception, CirronError)
        return done.output + str(done.exception)
    assert done.exit_code == 0, done.output
    return done.output


def as_json(*arguments: str) -> Any:
    """The JSON document that a command prints."""
    return json.loads(shown(*arguments, "--json"))
