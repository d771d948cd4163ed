# mypy: disable-error-code="no-untyped-call"
"""Which snapshot is meant, and how many of them are told apart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

import cirron_otel as ci
from cirron_otel.cli import snapshot_tables
from cirron_otel.cli.screen import Screen
from cirron_otel.spool import Spool
from cirron_otel.weights.reading import find, load
from weights.snapshots_by_hand import as_json, shown

if TYPE_CHECKING:
    import pytest


def test_a_snapshot_by_hand_is_shown_for_itself() -> None:
    """``epoch:N`` and ``last`` mix it with nothing else, and no fit with another one."""
    model, other = nn.Linear(2, 1, bias=False), nn.Linear(3, 1, bias=False)
    ci.profile(frameworks=[])
    for watched in (other, model):
        ci.watch(None)
        ci.watch(watched)
        for _ in ci.epochs(range(2)):
            ci.snapshot({"weight": torch.full((5,), 7.0), "mine": torch.ones(1)}, name="by hand")
    ci.snapshot(other, name="at the end")
    ci.shutdown()
    found = load(Spool(Path(".cirron")))
    assert [(row.tensor_name, row.shape) for row in find(found, "epoch:1").rows] == [
        ("weight", [1, 2])
    ]
    assert [row.shape for row in find(found, "last").rows] == [[1, 3]]
    assert [row.shape for row in find(found, "by hand").rows] == [[5], [1]]


def test_sessions_and_ranks_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where several wrote into one directory the list says whose each snapshot is."""
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        ci.profile(frameworks=[])
        ci.snapshot({"w": torch.ones(1)})
        ci.shutdown()
    head, *lines = shown("snapshots").splitlines()
    assert head.split()[:3] == ["SNAPSHOT", "SESSION", "RANK"]
    assert sorted(line.split()[2] for line in lines) == ["0", "1"]
    session = lines[0].split()[1]
    assert "RANK" not in shown("snapshots", "--session", session)
    assert {one["rank"] for one in as_json("snapshots")["snapshots"]} == {0, 1}


def test_a_narrow_terminal_gets_the_columns_that_matter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What does not fit is left out by whole columns, the least needed first, and named."""
    ci.profile(frameworks=[])
    ci.snapshot({"a.quite.long.name.of.a.tensor": torch.arange(9.0).reshape(3, 3)})
    ci.shutdown()
    (one,) = load(Spool(Path(".cirron")))
    for columns, gone in ((70, ["MIN", "MAX"]), (200, [])):
        screen = Screen(color=False)
        monkeypatch.setattr(screen, "columns", columns)
        snapshot_tables.rows(screen, one, one.rows)
        _, head, line, *notes = capsys.readouterr().out.splitlines()
        shown_columns = {"TENSOR", "NORM", "HISTOGRAM"} | ({"MIN", "MAX"} - set(gone))
        assert shown_columns <= set(head.split())
        assert len(line) <= columns
        assert not line.endswith("\u2026")
        assert all(any(name in note for note in notes) for name in gone)


def test_tensors_of_any_name_are_exported() -> None:
    """Also one that is called like an argument of numpy's, and complex ones as they are."""
    ci.profile(snapshots="full", frameworks=[])
    ci.snapshot({"file": torch.ones(2), "a/b": torch.tensor([1 - 2j]), "": torch.zeros(1)})
    ci.shutdown()
    shown("snapshot", "last", "--export", "x.npz")
    with np.load("x.npz") as arrays:
        assert arrays["file"].tolist() == [1, 1]
        assert arrays["a/b"].tolist() == [1 - 2j]
    assert "1-2j" in shown("snapshot", "last", "a/b")


def test_long_names_do_not_break_a_table() -> None:
    """In a table a very long name is without its middle; JSON has all of it."""
    name = "x" * 300 + "end"
    ci.profile(frameworks=[])
    ci.snapshot({name: torch.ones(1)}, name="y" * 300)
    ci.shutdown()
    for text in (shown("snapshots"), shown("snapshot", "last")):
        assert max(map(len, text.splitlines())) < 250
    assert "end  1" in shown("snapshot", "last")
    assert as_json("snapshot", "last")["tensors"][0]["tensor_name"] == name
