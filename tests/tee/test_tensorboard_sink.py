"""Marks written as TensorBoard's event files, read back by TensorBoard itself."""

from __future__ import annotations

import math
from pathlib import Path

import pytest  # noqa: TC002 - as in every test

import cirron_otel as ci
from cirron_otel.cli.app import run as command
from cirron_otel.sinks.tensorboard import TensorBoardSink
from helpers import RunProgram


def test_marks_are_scalars(run_program: RunProgram, capsys: pytest.CaptureFixture[str]) -> None:
    """Each run and attempt has a folder; steps are the marks' own, else iterations, else counts."""
    for attempt in range(2):
        ci.profile(frameworks=[], run_id="night", start_iteration=2 * attempt)
        for _ in ci.epochs(range(1)):
            for number in ci.batches(range(2)):
                ci.mark("loss", 0.5 - 0.25 * number)
                ci.mark("given", number, step=number * 100)
                ci.mark("note", "text")
        ci.mark("summary", math.nan)
        ci.shutdown()
    assert command(["tensorboard", "logs"]) == 0
    assert command(["tensorboard", "logs"]) == 0  # what the first call wrote is replaced
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2
    assert set(said) == {said[0]}
    assert said[0].endswith("points in 2 folders below logs")
    run = run_program(
        """
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        for folder in ("logs/night", "logs/night.attempt2"):
            events = EventAccumulator(folder)
            events.Reload()
            for tag in sorted(events.Tags()["scalars"]):
                if not tag.startswith("cirron."):  # what a run says of itself
                    print(folder, tag, *((one.step, one.value) for one in events.Scalars(tag)))
        """
    )
    assert run.stdout.splitlines() == [
        "logs/night given (0, 0.0) (100, 1.0)",
        "logs/night loss (0, 0.5) (1, 0.25)",
        "logs/night summary (0, nan)",
        "logs/night.attempt2 given (0, 0.0) (100, 1.0)",
        "logs/night.attempt2 loss (2, 0.5) (3, 0.25)",
        "logs/night.attempt2 summary (0, nan)",
    ]


def test_what_came_since_is_written_next() -> None:
    """A sink that goes on writes each point once, and tells of a file that is no batch."""
    ci.profile(frameworks=[], run_id="night")
    told: list[str] = []
    with TensorBoardSink("logs", on_error=lambda path, _: told.append(path.name)) as sink:
        ci.mark("loss", 1.0)
        ci.flush()
        assert sink.update() == 1
        assert sink.update() == 0
        ci.mark("loss", 2.0)
        Path(f".cirron/spool/{9:020d}-{'0' * 32}.json").write_text("{")
        ci.shutdown()
        assert sink.update() >= 1
        assert sink.folders == [Path("logs/night")]
    assert told == [f"{9:020d}-{'0' * 32}.json"]
