"""``cirron-otel traces replay``: any recorded session to a receiver, later and once more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import cirron_otel as ci
from delivery.otlp_server import grpc_receiver, http_receiver
from helpers import RunProgram, read_spool
from spool_by_hand import Writer, hex32, span, training

if TYPE_CHECKING:
    import pytest

COMMAND = [sys.executable, "-m", "cirron_otel.cli.main", "traces", "replay"]


def replay(*arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command in the test's directory."""
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == expect, done.stderr
    return done


def two_sessions() -> list[str]:
    """Two short recordings in the default directory; their ids, older first."""
    for run in ("one", "two"):
        ci.profile(frameworks=[], run_id=run)
        with ci.scope(run):
            ci.mark("x", 1)
        assert ci.shutdown()
    return [row.id for row in read_spool().named("cirron.session")]


def test_the_newest_or_the_one_named() -> None:
    """Without a name the newest session is sent, else the one, a whole run, or all."""
    first, second = two_sessions()
    with http_receiver() as server:
        done = replay("--otlp", server.url)
        assert server.names() == ["cirron.session", "two"]
        assert f"sent 2 spans of 1 session to {server.url}/v1/traces" in done.stdout
    with http_receiver() as server:
        replay("--otlp", server.url, "--session", first[:10])
        assert server.names() == ["cirron.session", "one"]
        replay("--otlp", server.url, second)
        assert server.names() == ["cirron.session", "cirron.session", "one", "two"]
    with http_receiver() as server:
        replay("--otlp", server.url, "--run", "one", "--header", "key=a=b")
        assert server.names() == ["cirron.session", "one"]
        assert server.requests[0].headers["key"] == "a=b"
        said = json.loads(replay("--otlp", server.url, "--all", "--json").stdout)
        assert (said["sessions"], said["spans"], said["rejected"]) == (2, 4, 0)
        # What it had already has the same ids.
        assert len(server.spans) == 4
        assert server.copies == 2


def test_protocol_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver may come from the environment, and the protocol from the call."""
    two_sessions()
    with grpc_receiver() as server:
        replay("--otlp", server.url)
        assert server.names() == ["cirron.session", "two"]
    with http_receiver() as server:
        replay("--protocol", "http/json", "--otlp", server.url)
        assert server.requests[-1].headers["content-type"] == "application/json"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        replay()
        assert server.requests[-1].headers["content-type"] == "application/x-protobuf"


def test_a_killed_run_is_whole(run_program: RunProgram) -> None:
    """What a process had open when it was killed is closed, and sent with the marks it had."""
    run_program(
        """
        import os, signal
        import cirron_otel as ci

        ci.profile(frameworks=[])
        scope = ci.scope("long")
        scope.__enter__()
        ci.mark("loss", 0.5)
        ci.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        expect=-9,
        measured=False,
    )
    with http_receiver() as server:
        replay("--otlp", server.url)
        assert server.names() == ["cirron.session", "long"]
        long = next(one for one in server.spans.values() if one.name == "long")
        assert [event.name for event in long.events] == ["loss"]
        assert long.status.code == 2
        assert {one.key for one in long.attributes} >= {"recovered", "cirron.mark.loss"}


def test_sessions_of_another_sdk(tmp_path: Path) -> None:
    """A session whose batches name none is sent too, and nothing of its neighbours."""
    write = Writer(tmp_path)
    write.batch(10, [span("s/a", "epoch", "s/1", 1, 2),
                     span("s/1", "cirron.session", None, 0, 5)])  # fmt: skip
    write.batch(20, [span("t/1", "cirron.session", None, 6, 9)])
    with http_receiver() as server:
        replay("--otlp", server.url, "--spool", str(tmp_path), "--session", hex32("s/1"))
        assert server.names() == ["cirron.session", "epoch"]


def test_a_receiver_that_is_away(tmp_path: Path) -> None:
    """Nobody there ends with status 1 and what to do; a wrong URL says what is right."""
    training(tmp_path)
    with http_receiver() as server:
        pass
    done = replay("--otlp", server.url, "--spool", str(tmp_path), "--patience", "0", expect=1)
    assert "Connection refused" in done.stderr
    assert "Run it again" in done.stderr
    done = replay("--otlp", "nowhere", "--spool", str(tmp_path), expect=1)
    assert "must be a URL" in done.stderr
    done = replay("--otlp", "http://x", "--run", "r", "--all", expect=2)
    assert "choose by" in done.stderr


def test_a_receiver_that_refuses(tmp_path: Path) -> None:
    """Batches that the receiver refuses are counted, and the status is 1."""
    training(tmp_path, epochs=1, steps=1)
    with http_receiver() as server:
        server.script = [503, 400]
        done = replay("--otlp", server.url, "--spool", str(tmp_path), expect=1)
    assert "refused 0 spans and 1 batches" in done.stderr
    assert len(server.spans) == 1
