"""`cirron-otel doctor` finds what is wrong with a service's set-up, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cirron_otel.cli.app import cli
from cirron_otel.serving import checkup
from helpers import RunProgram

GOOD = """
import cirron_otel as ci
from fastapi import FastAPI
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
ci.profile(frameworks=[], set_global=True, spans="all")
app = FastAPI()
app.add_middleware(ci.CirronMiddleware)
FastAPIInstrumentor.instrument_app(app, exclude_spans=["send", "receive"])
"""


def test_a_service_that_is_well(tmp_path: Path) -> None:
    """Nothing to mend, status 0; the application was loaded, and no file is left of it."""
    (tmp_path / "service.py").write_text(GOOD, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "cirron_otel.cli.main", "doctor", "service:app"],
        cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "nothing to mend"), done
    assert "each call has one server span" in done.stdout
    assert "CirronMiddleware makes every call a request" in done.stdout
    assert "server spans come from the recording's own TracerProvider" in done.stdout
    assert not (tmp_path / ".cirron").exists()


def test_what_is_wrong_is_named_with_what_to_do(run_program: RunProgram) -> None:
    """Spans of parts, also in what was recorded, no provider, two middlewares; with remedies."""
    run = run_program(
        """
        import asyncio, httpx
        import fastapi
        from fastapi.responses import StreamingResponse
        from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
        import cirron_otel as ci
        from cirron_otel.serving.checkup_app import check_app

        def wrong(app):
            for one in check_app(app, None):
                if one.state != "ok":
                    print(one.state, one.what.split(":")[0], "->", one.todo.replace("\\n", " "))

        print("--- no recording")
        wrong(fastapi.FastAPI())
        ci.profile(frameworks=[])
        app = fastapi.FastAPI()
        @app.get("/")
        def answer():
            return StreamingResponse(iter(["x"] * 20))
        app.add_middleware(ci.CirronMiddleware)
        FastAPIInstrumentor.instrument_app(app)
        print("--- nobody takes the server spans")
        wrong(app)
        ci.shutdown()
        ci.profile(frameworks=[], set_global=True, spans="all")
        print("--- two middlewares")
        wrong(ci.CirronMiddleware(app))
        FastAPIInstrumentor().instrument()
        print("--- by opentelemetry-instrument")
        wrong(fastapi.FastAPI())

        async def main():
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                await client.get("/")
        asyncio.run(main())
        ci.shutdown()
        """
    )
    none, nobody, two, automatic = (part.splitlines() for part in run.stdout.split("--- ")[1:])
    assert any("starts no recording" in line for line in none)
    assert any("no instrumentation" in line for line in none)
    assert any(checkup.EXCLUDE_SPANS in line for line in nobody)
    assert any("there is no TracerProvider" in line for line in nobody)
    assert any("2 CirronMiddlewares" in line for line in two)
    assert any("outside of OpenTelemetry's" in line for line in two)
    assert any("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS=fastapi" in line for line in automatic)
    (said,) = [one for what, one in found().items() if "single parts" in what]
    assert (said["state"], said["todo"]) == ("warning", checkup.EXCLUDE_SPANS)


@pytest.mark.parametrize(
    ("named", "said"),
    [("nothing:app", "No module named 'nothing'"), ("ends:app", "SystemExit: no"),
     ("ends", "as for the server: service:app"), ("json:other", "no attribute 'other'")],
)  # fmt: skip
def test_an_application_that_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: str, said: str
) -> None:
    """What is missing is said; status 2, as for a mistake in the command."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("CIRRON_OUTPUT", "spool")
    monkeypatch.setenv("CIRRON_FORWARD", "off")
    (tmp_path / "ends.py").write_text("raise SystemExit('no')", encoding="utf-8")
    result = CliRunner().invoke(cli, ["doctor", named])
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output


def found(*args: str) -> dict[str, dict[str, Any]]:
    """What the command finds without an application, by the first word of each line."""
    result = CliRunner().invoke(cli, ["doctor", "--json", *args])
    return {one["what"]: one for one in json.loads(result.output)}


def test_settings_and_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What keeps a recording from the disk is an error; what is not sent is a note."""
    assert any("can be written" in what for what in found())
    assert any("nothing is sent" in what for what in found())
    assert any(str(tmp_path / "other") in what for what in found("--dir", str(tmp_path / "other")))
    (tmp_path / "file").write_text("x")
    errors = [one for one in found("--dir", str(tmp_path / "file")).values()
              if one["state"] == "error"]  # fmt: skip
    assert "cannot be written" in errors[0]["what"]
    assert "CIRRON_OUTPUT_DIR" in errors[0]["todo"]
    monkeypatch.setenv("CIRRON_SPOOL_MAX_BYTES", str(10**18))
    assert any("of room" in what for what in found())
    monkeypatch.setenv("CIRRON_SAMPLE_RATE", "many")
    assert any("CIRRON_SAMPLE_RATE" in what for what in found())
    monkeypatch.setenv("CIRRON_ENABLED", "false")
    assert any("switched off" in what for what in found())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
