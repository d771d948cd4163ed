"""What the user reads when delivery fails: the right place to look at, and no secret."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

import cirron_otel as ci
from cirron_otel import transport
from cirron_otel.cli.app import cli
from cirron_otel.cursors import Cursor
from cirron_otel.destinations.base import Accepted, Parcel, RetryAfter
from cirron_otel.destinations.http import HttpClient
from cirron_otel.destinations.otlp_settings import otlp_targets
from cirron_otel.destinations.platform import Platform
from cirron_otel.forwarder import Forwarder
from cirron_otel.settings import resolve
from delivery.otlp_server import http_receiver
from delivery.platform_server import KEY, PlatformServer
from delivery.receivers import Receiver, record


def test_a_key_in_the_query_of_a_receiver_is_never_shown(tmp_path: Path) -> None:
    """It goes to the receiver, and into no description, message or health."""
    with http_receiver() as server:
        url = f"{server.url}/v1/traces?api_key=hush&x=1"
        (spec,) = transport.resolve(resolve(call={"otlp": {"endpoint": url, "signals": "traces"}}))
        assert "hush" not in spec.description + repr(spec)
        assert spec.description.endswith("/v1/traces?***")
        destination = transport.connect(spec)
        assert "hush" not in destination.description
        record(tmp_path, 1)
        (path,) = (tmp_path / "spool").glob("*.json")
        assert destination.send(Parcel.read(path)) == Accepted()
        destination.close()
        assert [one.path for one in server.requests] == ["/v1/traces?api_key=hush&x=1"]
    twice = [{"endpoint": url, "timeout": 1}, {"endpoint": url, "timeout": 2}]
    with pytest.raises(ci.ConfigurationError, match=r"\?\*\*\* twice") as caught:
        otlp_targets(twice)
    assert "hush" not in str(caught.value)


def test_a_proxy_that_is_not_there_is_named_as_the_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is about the proxy, and shows nothing of its password."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        proxy = f"http://user:hush@127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setenv("http_proxy", proxy)
        answer = HttpClient("http://127.0.0.2:1/").request("GET", "http://127.0.0.2:1/", headers={})
    assert answer == RetryAfter(None, f"the proxy: {os.strerror(errno.ECONNREFUSED)}")


def test_https_to_a_port_without_tls_is_explained() -> None:
    """The user reads what to change, not OpenSSL's words."""
    with PlatformServer() as server:
        url = server.url.replace("http:", "https:")
        answer = HttpClient(url).request("POST", url, headers={}, body=b"x")
    assert isinstance(answer, RetryAfter)
    assert "speaks no TLS" in answer.reason


def test_a_redirect_elsewhere_is_told_with_its_port(tmp_path: Path) -> None:
    """The address that the user should look at is whole, but for login and query."""
    with PlatformServer(default="redirect:https://u:hush@127.0.0.1:8443/v2?key=hush") as server:
        platform = Platform(server.url, "/v1/traces", lambda: KEY, output_dir=tmp_path)
        answer = platform.send(Parcel("0" * 32, tmp_path / "x.json", b"{}"))
        platform.close()
    assert isinstance(answer, RetryAfter)
    assert "redirected to https://127.0.0.1:8443/v2;" in answer.reason


def test_what_another_process_holds_is_said_so(tmp_path: Path) -> None:
    """A flush that can do nothing says who delivers, and does not only count."""
    record(tmp_path, 2)
    holder = Cursor(tmp_path, "receiver")
    assert holder.take()
    receiver = Receiver()
    forwarder = Forwarder((tmp_path,), (receiver,), poll_s=0.02)
    forwarder.start()
    (left,) = forwarder.drain(20, others=True)
    who = f"process {os.getpid()} on {socket.gethostname()}"
    assert (left.batches, left.error) == (2, f"another process delivers there ({who})")
    holder.release()
    assert forwarder.stop(20) == []


def test_the_patience_of_a_flush_is_for_other_processes_too(tmp_path: Path) -> None:
    """The helper of a program that was just killed may hold a place for a while: it is awaited."""
    record(tmp_path, 2)
    holder = Cursor(tmp_path, "receiver")
    assert holder.take()
    receiver = Receiver()
    forwarder = Forwarder((tmp_path,), (receiver,), poll_s=0.02)
    forwarder.start()
    dying = threading.Timer(1.5, holder.release)
    dying.start()
    assert forwarder.drain(None, patience=20, others=True) == []
    dying.join()
    assert len(receiver.taken) == 2
    assert forwarder.stop(20) == []


def test_a_flush_says_for_whom_it_waits(tmp_path: Path) -> None:
    """While another process delivers there the user reads which one; then it goes on by itself."""
    record(tmp_path, 2)
    with http_receiver() as server:
        (spec,) = transport.resolve(resolve(call={"otlp": server.url}))
        holder = Cursor(tmp_path, spec.name)
        assert holder.take()
        command = [str(Path(sys.executable).with_name("cirron-otel")), "spool", "flush"]
        command += ["--dir", str(tmp_path), "--otlp", server.url, "--patience", "120"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            line = process.stderr.readline()
            holder.release()
            assert process.wait(120) == 0
    who = f"process {os.getpid()} on {socket.gethostname()}"
    assert line == f"2 batches to send: waiting for {who}, which delivers there\n"


def test_a_sidecar_without_a_spool_says_that_it_waits(tmp_path: Path) -> None:
    """A misspelt directory does not look like one that is being delivered."""
    command = [str(Path(sys.executable).with_name("cirron-otel")), "forward", "nowhere"]
    command += ["--otlp", "http://127.0.0.1:1"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        process.terminate()
        assert line == f"no spool in {tmp_path / 'nowhere'} yet: waiting for one\n"
        assert process.wait(20) == 0


@pytest.mark.parametrize("option", ["--patience", "--timeout"])
def test_a_negative_wait_is_an_error(option: str, tmp_path: Path) -> None:
    """It is no silent flush that sends nothing."""
    record(tmp_path, 1)
    arguments = ["spool", "flush", "--dir", str(tmp_path), "--otlp", "http://127.0.0.1:1"]
    done = CliRunner().invoke(cli, [*arguments, option, "-1"])
    assert done.exit_code == 2
    assert "not in the range" in done.stderr


def test_a_wrong_url_is_told_by_the_name_of_the_option(tmp_path: Path) -> None:
    """Who has typed --otlp is not told of an argument of profile()."""
    record(tmp_path, 1)
    arguments = ["spool", "flush", "--dir", str(tmp_path), "--otlp", "localhost:4318"]
    done = CliRunner().invoke(cli, arguments)
    assert isinstance(done.exception, ci.ConfigurationError)
    assert str(done.exception).startswith("--otlp = 'localhost:4318' is no endpoint for OTLP")
