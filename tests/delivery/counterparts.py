"""Foreign programs for the tests of delivery: a real collector and a real backend, on loopback.

MLflow lies in an environment of its own (`make counterparts`); a test that needs it fails without.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rotel

_ROOT = Path(__file__).resolve().parents[2]
COUNTERPARTS = _ROOT / ".venv-counterparts" / "bin"
_ROTEL = Path(rotel.__file__).parent / "rotel-agent"


def free_port() -> int:
    """A port of the loopback that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(home: Path, **more: str) -> dict[str, str]:
    """What a foreign program gets: none of the settings that the tests run under."""
    return {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", **more}


def _wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
            return
        time.sleep(0.02)
    pytest.fail(f"it does not listen on {port}:\n{log.read_text(errors='replace')[-3000:]}")


class Rotel:
    """A running collector: where it listens, and its end, polite or not."""

    def __init__(self, process: subprocess.Popen[bytes], http: int, grpc: int) -> None:
        self._process = process
        self.http = f"http://127.0.0.1:{http}"
        self.grpc = f"grpc://127.0.0.1:{grpc}"

    def stop(self) -> None:
        """End it as an operator does: it sends first what it has."""
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self.kill()

    def kill(self) -> None:
        """End it as a crash does."""
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def running_rotel(home: Path, backend: str, headers: str = "") -> Iterator[Rotel]:
    """A collector in front of an OTLP/HTTP backend; killed at the end if it still runs."""
    http, grpc = free_port(), free_port()
    home.mkdir(parents=True, exist_ok=True)
    log = home / "rotel.log"
    environment = _environment(
        home,
        ROTEL_EXPORTERS="back:otlp",
        ROTEL_EXPORTERS_TRACES="back",
        ROTEL_EXPORTERS_METRICS="back",
        ROTEL_EXPORTERS_LOGS="back",
        ROTEL_EXPORTER_BACK_ENDPOINT=backend,
        ROTEL_EXPORTER_BACK_PROTOCOL="http",
        **({"ROTEL_EXPORTER_BACK_CUSTOM_HEADERS": headers} if headers else {}),
    )
    command = [
        str(_ROTEL), "start",
        "--otlp-http-endpoint", f"127.0.0.1:{http}",
        "--otlp-grpc-endpoint", f"127.0.0.1:{grpc}",
        "--pid-file", str(home / "rotel.pid"), "--log-file", str(log),
    ]  # fmt: skip
    with log.open("ab") as out:
        process = subprocess.Popen(command, env=environment, cwd=home, stdout=out, stderr=out)
    try:
        _wait_for_port(http, process, log)
        _wait_for_port(grpc, process, log)
        yield Rotel(process, http, grpc)
    finally:
        process.kill()
        process.wait()


class Mlflow:
    """A running MLflow, and what it says it has."""

    def __init__(self, url: str) -> None:
        self.url = url

    def _call(self, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(  # noqa: S310 - a loopback address
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=30) as answer:
            return json.load(answer)

    def experiment(self, name: str) -> str:
        """The id of a new experiment."""
        made = self._call("/api/2.0/mlflow/experiments/create", {"name": name})
        return str(made["experiment_id"])

    def spans(self, experiment: str) -> dict[str, dict[str, Any]]:
        """Every span of an experiment by its id, with hex ids and plain attributes."""
        where = {"type": "MLFLOW_EXPERIMENT", "mlflow_experiment": {"experiment_id": experiment}}
        found: dict[str, dict[str, Any]] = {}
        token = None
        while True:
            page = {"locations": [where], **({"page_token": token} if token else {})}
            answer = self._call("/api/3.0/mlflow/traces/search", page)
            for info in answer.get("traces", ()):
                trace = self._call(f"/api/3.0/mlflow/traces/get?trace_id={info['trace_id']}")
                for span in trace["trace"]["spans"]:
                    found[b64decode(span["span_id"]).hex()] = _plain(span)
            token = answer.get("next_page_token")
            if not token:
                return found

    def wait_for(self, experiment: str, count: int) -> dict[str, dict[str, Any]]:
        """The spans of an experiment, once there are so many; waits half a minute."""
        deadline = time.monotonic() + 30
        found = self.spans(experiment)
        while len(found) < count and time.monotonic() < deadline:
            time.sleep(0.2)
            found = self.spans(experiment)
        return found


def _plain(span: dict[str, Any]) -> dict[str, Any]:
    attrs = _attributes(span)
    attrs.pop("mlflow.traceRequestId", None)
    status = span.get("status") or {}
    return {
        "trace_id": b64decode(span["trace_id"]).hex(),
        "parent_id": b64decode(span.get("parent_span_id") or "").hex(),
        "name": span["name"],
        "start_ns": int(span["start_time_unix_nano"]),
        "end_ns": int(span["end_time_unix_nano"]),
        "attrs": attrs,
        "events": [
            (int(event["time_unix_nano"]), event["name"], _attributes(event))
            for event in span.get("events", ())
        ],
        "status": (status.get("code", 0), status.get("message", "")),
    }


def _attributes(thing: dict[str, Any]) -> dict[str, Any]:
    return {one["key"]: _value(one.get("value") or {}) for one in thing.get("attributes", ())}


def _value(value: dict[str, Any]) -> Any:
    for kind, said in value.items():
        if kind == "array_value":
            return [_value(item) for item in said.get("values", ())]
        if kind == "kvlist_value":
            return {one["key"]: _value(one.get("value") or {}) for one in said.get("values", ())}
        return int(said) if kind == "int_value" else said
    return None


@contextlib.contextmanager
def running_mlflow(home: Path) -> Iterator[Mlflow]:
    """An MLflow server with an empty SQLite store."""
    program = COUNTERPARTS / "mlflow"
    if not program.exists():
        pytest.fail("MLflow is not there: run `make counterparts` first")
    port = free_port()
    log = home / "mlflow.log"
    environment = _environment(
        home,
        MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false",
        MLFLOW_DISABLE_TELEMETRY="true",
        DO_NOT_TRACK="true",
    )
    command = [
        str(program), "server", "--host", "127.0.0.1", "--port", str(port),
        "--backend-store-uri", f"sqlite:///{home}/mlflow.db",
        "--artifacts-destination", str(home / "artifacts"), "--workers", "1",
    ]  # fmt: skip
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, env=environment, cwd=home, stdout=out, stderr=out, start_new_session=True
        )
    server = Mlflow(f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + 200
        while True:
            with contextlib.suppress(OSError):
                opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
                with opener.open(f"{server.url}/health", timeout=2):
                    break
            if time.monotonic() > deadline or process.poll() is not None:
                pytest.fail(f"MLflow does not start:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.2)
        yield server
    finally:
        # It is a group of processes of its own: the server and its worker.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
