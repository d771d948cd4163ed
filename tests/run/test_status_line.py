"""The progress line on a terminal: at its bottom, by itself, and gone at the end."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from cirron_otel.run.status_line import StatusLine

#: Prints while it trains, also parts of a line, then ends in the way it is told.
TRAINING = """
import os, signal, sys, time
import cirron_otel as ci
from cirron_otel import lifecycle, recorder
from cirron_otel.run import reporter
reporter.LINE_EVERY_S = 0.01
lifecycle._SIGNAL_WAIT_S = reporter._GONE_S = reporter._LAST_S = 30.0  # however busy the machine is
ci.profile(frameworks=[], otlp="none", flush_interval=0.02, terminal="progress")
for epoch in ci.epochs(range(2)):
    for i in ci.batches(range(10)):
        print(f"user {epoch}.{i} ", end="", flush=True)
        time.sleep(0.03)
        print("done", file=sys.stderr)
    deadline = time.monotonic() + 30
    while f"epoch {epoch + 1}" not in recorder._current.run.reporter._line._shown:
        time.sleep(0.01)
        assert time.monotonic() < deadline
if sys.argv[1] == "raise":
    raise ValueError("of the program")
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(30)
"""
#: What we write: everything between saving and restoring the cursor, with what leads to it.
OURS = re.compile(r"(?:\x1bD)?\x1b7\x1b\[[0-9;]*[rH].*?\x1b8(?:\x1b\[A)?", re.DOTALL)
GIVEN_BACK = "\x1b7\x1b[r\x1b[24;1H\x1b[2K\x1b8"


def on_terminal(directory: Path, how: str) -> tuple[str, int]:
    """What a terminal of 24 lines gets from the program, and the program's status."""
    program = directory / "program.py"
    program.write_text(TRAINING, encoding="utf-8")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    name = os.ttyname(theirs)
    process = subprocess.Popen(
        [sys.executable, program, how],
        cwd=directory, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        # Opened by the leader of a session it becomes the terminal that controls it.
        preexec_fn=lambda: os.close(os.open(name, os.O_RDWR)),  # noqa: PLW1509
        env={**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    os.close(theirs)
    return everything(ours), process.wait()


def everything(ours: int) -> str:
    """What comes until the other end is closed."""
    parts = []
    with contextlib.suppress(OSError):
        while part := os.read(ours, 65536):
            parts.append(part)
    os.close(ours)
    return b"".join(parts).decode()


@pytest.mark.parametrize(("how", "status"), [("raise", 1), ("term", -15)])
def test_a_line_at_the_bottom(tmp_path: Path, how: str, status: int) -> None:
    """It is redrawn in place, and what the program prints is whole without it; then it is gone.

    However the program ends: by an exception, by a signal.
    """
    text, ended = on_terminal(tmp_path, how)
    assert ended == status
    drawn = [found for found in OURS.findall(text) if "epoch" in found]
    assert any("epoch 2/2  step " in one for one in drawn)
    assert all("\x1b[24;1H\x1b[2Kepoch " in one for one in drawn)
    printed = OURS.sub("", text).replace("\r\n", "\n")
    expected = [f"user {epoch}.{i} done" for epoch in range(2) for i in range(10)]
    assert printed.splitlines()[:20] == expected
    assert "\x1b" not in printed
    assert text.count("\x1b[1;23r") == 1
    assert text.count(GIVEN_BACK) == 1
    assert not OURS.findall(text[text.index(GIVEN_BACK) + len(GIVEN_BACK) :])
    if status >= 0:
        assert "training steps" in printed  # the table, below


def shown(*sizes: tuple[int, int]) -> str:
    """What a terminal gets that has these rows and columns, one after the other."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w", encoding="utf-8") as stream:
        line = StatusLine(stream)
        for size in sizes:
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
            line.show("0123456789")
            line.show("0123456789")
        stream.write(".")
    return everything(ours).removesuffix(".")


def test_no_line_where_there_is_no_terminal_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """None on one that cannot move its cursor, none on a very small one, none in a file."""
    monkeypatch.setenv("TERM", "dumb")
    assert shown((24, 80)) == ""
    monkeypatch.setenv("TERM", "xterm")
    assert shown((3, 80)) == ""
    for stream in (None, io.StringIO()):
        line = StatusLine(stream)
        line.show("text")
        line.clear()
        assert stream is None or stream.getvalue() == ""


def test_a_terminal_that_changes_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line moves to the new bottom row, and is cut to the new width."""
    monkeypatch.setenv("TERM", "xterm")
    text = shown((24, 80), (10, 6))
    assert text.count("\x1b[1;23r") == text.count("\x1b[1;9r") == 1
    assert text.count("\x1b[24;1H\x1b[2K0123456789\x1b8") == 1
    assert text.endswith("\x1b[10;1H\x1b[2K012345\x1b8")
