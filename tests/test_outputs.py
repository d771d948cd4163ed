"""``output``: closed spans as lines, beside or instead of the spool, and never in the way."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

import cirron_otel as ci
from helpers import RunProgram, read_spool

PROGRAM = """
    import sys
    import cirron_otel as ci

    ci.profile(frameworks=[], output=sys.argv[1:])
    with ci.scope("epoch", index=0, lr=0.1):
        ci.mark("loss", 0.5)
    ci.shutdown()
"""
LINES = [
    r"\[cirron\] epoch\[0\]  [\d.]+ [nµum]*s  lr=0\.1",
    r"\[cirron\] cirron\.session  .*pid=\d+.*",
]


def _are_the_lines(found: list[str]) -> bool:
    return len(found) == 2 and all(map(re.fullmatch, LINES, found))


@pytest.mark.parametrize("beside", [(), ("spool",)])
def test_lines_on_standard_output(run_program: RunProgram, beside: tuple[str, ...]) -> None:
    """Each closed span is a line, in the order of closing, with or without the spool."""
    run = run_program(PROGRAM, args=("stdout", *beside))
    assert _are_the_lines(run.stdout.splitlines())
    assert run.stderr == ""
    assert run.output_dir.exists() is bool(beside)
    assert len(run.spans) == (2 if beside else 0)


def test_lines_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The logger ``cirron_otel.trace`` gets them, at INFO, and no file is written."""
    with caplog.at_level(logging.INFO, logger="cirron_otel.trace"):
        ci.profile(frameworks=[], output="log")
        with ci.scope("epoch", index=0, lr=0.1):
            pass
        ci.shutdown()
    found = [record for record in caplog.records if record.name == "cirron_otel.trace"]
    assert _are_the_lines([record.getMessage() for record in found])
    assert {record.levelno for record in found} == {logging.INFO}
    assert not Path(".cirron").exists()


def test_none_writes_nothing(run_program: RunProgram) -> None:
    """``none`` wins over what stands beside it: no line, no directory, no complaint."""
    run = run_program(PROGRAM, args=("none", "spool", "stdout"))
    assert (run.stdout, run.stderr, run.output_dir.exists()) == ("", "", False)


def test_what_a_line_says_stays_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Line breaks and escape sequences in names and attributes are spelled out."""
    ci.profile(frameworks=[], output="stdout")
    with ci.scope("a\nb", note="\x1b[31mred\n"):
        pass
    ci.shutdown()
    first, _ = capsys.readouterr().out.splitlines()
    assert first.isprintable()


@pytest.mark.parametrize(
    "close",
    [
        "sys.stdout.close()",
        "sys.stdout = None",
        "read, write = os.pipe(); os.dup2(write, 1); os.close(read)",
    ],
)
def test_a_closed_standard_output_does_no_harm(run_program: RunProgram, close: str) -> None:
    """The spool is whole and the exit status the program's own, whoever closed its output."""
    run = run_program(
        f"""
        import os, sys
        import cirron_otel as ci

        {close}
        ci.profile(frameworks=[], output=["spool", "stdout"])
        for index in range(3):
            with ci.scope("epoch", index=index):
                ci.flush()
        ci.shutdown()
        sys.exit(7)
        """,
        expect=7,
    )
    assert len(run.named("epoch")) == 3
    assert run.stderr.count("a span line could not be written") <= 1
    assert "Traceback" not in run.stderr


def test_every_flush_prints_what_has_closed(capfd: pytest.CaptureFixture[str]) -> None:
    """Lines come while the run goes on, not at its end."""
    ci.profile(frameworks=[], output=["spool", "stdout"])
    with ci.scope("first"):
        pass
    assert ci.flush()
    assert capfd.readouterr().out.startswith("[cirron] first")
    ci.shutdown()
    assert len(read_spool().spans) == 2
