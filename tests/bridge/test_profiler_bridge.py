"""Scopes in torch's profiler, and windows of steps that it records, looked at in their files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import cirron_otel as ci
from cirron_otel import recorder
from cirron_otel.errors import ConfigurationError
from helpers import ProgramRun, RunProgram


def events(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A trace file, and the ranges that programs made in it, by start."""
    trace = json.loads(gzip.decompress(file.read_bytes()))
    ranges = [one for one in trace["traceEvents"] if one.get("cat") == "user_annotation"]
    return trace, sorted(ranges, key=lambda one: (one["ts"], -one["dur"]))


def assert_nested(ranges: list[dict[str, Any]]) -> None:
    """Fail where two ranges of a thread overlap and neither holds the other."""
    open_until: dict[Any, list[float]] = {}
    for one in ranges:
        ends = open_until.setdefault((one["pid"], one["tid"]), [])
        while ends and ends[-1] <= one["ts"]:
            ends.pop()
        end = one["ts"] + one["dur"]
        assert not ends or end <= ends[-1] + 0.002, one["name"]
        ends.append(end)


PROGRAM = """
    import asyncio
    import time
    import torch
    import cirron_otel as ci
    from cirron_otel import findings, recorder

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(torch.zeros(4, 4), batch_size=2)

    def epoch():
        for batch in ci.batches(loader):
            model(batch).sum().backward()
            optimizer.step()
            outer, inner = ci.scope("outer"), ci.scope("inner")
            outer.__enter__()
            inner.__enter__()
            outer.__exit__(None, None, None)
            inner.__exit__(None, None, None)

    async def task():
        with ci.scope("in_a_task"):
            await asyncio.sleep(0)

    # Windows.
    profiler = ci.profile(run_id="night", profile_on="slow_rank", frameworks=["torch"])
    rec = recorder._current
    first = ci.profile_window(steps=3)
    assert ci.profile_window(steps=1).file is None  # one at a time
    for number in ci.epochs(range(4)):
        if number == 2:
            findings.report(rec, findings.Finding("other", "warning", "no window"))
            findings.report(rec, findings.Finding("slow_rank", "info", "a window"))
        epoch()
    assert not rec.listening.scopes and not rec.busy  # the hot path is back
    with torch.profiler.profile():
        refused = ci.profile_window(steps=1)
        epoch()
    with ci.scope("by_hand"), ci.profile_window() as block:
        model(torch.zeros(1, 4))
    never = ci.profile_window(steps=5)
    never.stop()
    while not first.done:
        time.sleep(0.01)
    last = ci.profile_window(steps=100)
    epoch()
    ci.shutdown()
    print(refused.error, never.error, sep="|")
    print(profiler.health()["swallowed_errors"])

    # Mirrors.
    profiler = ci.profile(run_id="mirrored", mirror="record_function", frameworks=["torch"])
    with torch.profiler.profile() as recorded:
        with ci.scope("work", index=3):
            epoch()
        asyncio.run(task())
    recorded.export_chrome_trace("trace.json.gz")
    ci.shutdown()
    print(profiler.health()["swallowed_errors"])
    profiler = ci.profile(mirror="nvtx", frameworks=["torch"])
    epoch()
    print(torch.cuda.is_available() or not recorder._current.listening.scopes)
    ci.shutdown()
    print(profiler.health()["swallowed_errors"])
"""


def test_windows_and_mirrors(run_program: RunProgram) -> None:
    """Windows, asked for or begun by a finding, and mirrors: what torch's profiler wrote."""
    run = run_program(PROGRAM)
    assert run.stdout.splitlines() == [
        "torch's profiler is running already|no step was made", "{}", "{}", "True", "{}",
    ]  # fmt: skip
    check_windows(run)
    check_mirrored(run)


def check_windows(run: ProgramRun) -> None:
    """Each window has its steps in a file that nests and names its rank, and they name the file."""
    files = sorted((run.output_dir / "profiles").iterdir())
    stem = "night-rank0-attempt1"
    assert [file.name.removesuffix(".pt.trace.json.gz") for file in files] == [
        f"{stem}-block", f"{stem}-iteration000000", f"{stem}-iteration000004",
        f"{stem}-iteration000010",
    ]  # fmt: skip
    linked = {
        (span.name, span.iteration): span.attrs["cirron.profile.file"]
        for span in run.spans
        if "cirron.profile.file" in span.attrs
    }
    assert {name for name, _ in linked} == {"step", "by_hand"}
    assert [number for name, number in linked if name == "step"] == [0, 1, 2, 4, 5, 6, 10, 11]
    assert set(linked.values()) == {f"profiles/{file.name}" for file in files}
    rows = [row for batch in run.batches for row in (batch.logs or [])]
    told = [row["attrs"] for row in rows if row["event_name"] == "cirron.profile.window"]
    assert {
        "cirron.profile.file": f"profiles/{files[1].name}",
        "cirron.profile.steps": 3,
        "cirron.profile.bytes": files[1].stat().st_size,
    } in told
    trace, ranges = events(files[1])
    assert trace["distributedInfo"] == {"rank": 0, "world_size": 1}
    assert trace["cirron.run.id"] == "night"
    names = [one["name"] for one in ranges]
    assert [name for name in names if name.startswith("Profiler")] == [
        "ProfilerStep#0", "ProfilerStep#1", "ProfilerStep#2",
    ]  # fmt: skip
    assert [name for name in names if name.startswith("step[")] == ["step[0]", "step[1]", "step[0]"]
    assert {"forward", "backward", "optimizer_step", "outer", "inner"} <= set(names)
    for file in files:
        assert_nested(events(file)[1])
    assert "forward" in [one["name"] for one in events(files[0])[1]]


def check_mirrored(run: ProgramRun) -> None:
    """Scopes are ranges of the program's own profiler; those of tasks are not."""
    _, ranges = events(run.output_dir.parent / "trace.json.gz")
    names = [one["name"] for one in ranges]
    assert names[0] == "work[3]"
    assert names.count("forward") == names.count("step[0]") + names.count("step[1]") == 2
    assert "in_a_task" not in names
    assert_nested(ranges)
    assert len(run.named("in_a_task")) == 1


def test_without_a_recording_or_torch() -> None:
    """A window where nothing is recorded does nothing; what is no number of steps is refused."""
    with ci.profile_window() as idle:
        pass
    assert (idle.file, idle.done) == (None, False)
    with pytest.raises(ValueError, match="whole number from 1 to 1000"):
        ci.profile_window(steps=0)
    with pytest.raises(ConfigurationError, match="record_function, nvtx or off"):
        ci.profile(mirror="kineto", frameworks=[])


def test_a_window_that_is_asked_for_and_never_begins() -> None:
    """Without a step the session ends as ever, and nothing listens any more."""
    ci.profile(frameworks=[])
    rec = recorder._current
    window = ci.profile_window(steps=2)
    assert rec.busy
    ci.shutdown()
    assert window.file is None
    assert not Path(".cirron/profiles").exists()
