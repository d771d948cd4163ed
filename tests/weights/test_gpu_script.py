"""``make gpu-check`` on a machine without a GPU: it says so, and nothing in it is misspelt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "gpu" / "check.py"


def _run(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_every_check_and_figure_of_the_gpu_script_runs_on_the_cpu(tmp_path: Path) -> None:
    """With small sizes all of it passes; what is printed and written is complete."""
    done = _run(tmp_path, "--device", "cpu", "--out", "all.json", TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads((tmp_path / "all.json").read_text())
    assert found["errors"] == {}
    assert set(found["checks"].values()) == {None}
    assert "statistics_are_made_on_the_device" in found["checks"]
    assert "nothing_waits_for_the_device" in found["checks"]
    work = [row["work"] for row in found["figures"]]
    assert "25.6 M: training thread blocked" in work
    assert "1 G: training thread blocked" in work
    assert "host reads of one check of the monitor" in work
    assert "nothing here is a figure of a GPU" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_script_checks_nothing_and_says_so(tmp_path: Path) -> None:
    """It ends with 2, which is neither passed nor failed."""
    done = _run(tmp_path)
    assert done.returncode == 2
    assert "nothing was checked" in done.stdout
