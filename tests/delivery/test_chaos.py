"""Platform, training and forwarder are killed at random; everything arrives, once per id.

``CHAOS_SECONDS`` says for how long (``make chaos``: 120); the seed is in the failure's output and
may be given as ``CHAOS_SEED``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from cirron_otel.cli.main import main
from delivery import platform_server
from delivery.receivers import until
from helpers import read_spool

SECONDS = float(os.environ.get("CHAOS_SECONDS", "15"))
#: How long what must happen may take on a busy machine.
HURRY_S = 120.0
wait_until = functools.partial(until, timeout=HURRY_S)

#: Writes the name of a step into a file of its own when the step is on disk for certain.
TRAINING = """
    import sys, time
    import cirron_otel as ci
    life = sys.argv[1]
    ci.profile(frameworks=[], flush_interval=0.1, forward=sys.argv[2], exit_budget=1)
    k = 0
    with open(f"certain-{life}", "a", buffering=1) as certain:
        while True:
            names = []
            for _ in range(20):
                with ci.scope("step", index=k, key=f"{life}.{k}"):
                    ci.mark("loss", 1.0 / (k + 1))
                    names.append(f"{life}.{k}")
                    k += 1
                time.sleep(0.002)
            if ci.flush():
                certain.write("\\n".join(names) + "\\n")
"""


class Scene:
    """The processes, each of which may be killed and started again."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.root = root
        self.rng = rng
        self.store = root / "store"
        self.store.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        (root / "training.py").write_text(dedent(TRAINING))
        self.life = 0
        #: Those of trainings that were killed; each has a last word to write.
        self.helpers: list[psutil.Process] = []
        self.log = (root / "log").open("w")
        self.platform = self.start_platform("--chaos", str(rng.randrange(10**6)))
        self.training = self.start_training()
        self.killed = {"platform": 0, "training": 0, "helper": 0}

    def start_platform(self, *arguments: str) -> subprocess.Popen[bytes]:
        """On the same port and with the same store as before."""
        return subprocess.Popen(
            [
                sys.executable, platform_server.__file__,
                "--store", str(self.store), "--port", str(self.port), *arguments,
            ],
            stdout=subprocess.DEVNULL, stderr=self.log,
        )  # fmt: skip

    def start_training(self) -> subprocess.Popen[bytes]:
        """Another life of the same job, in the same directory."""
        self.life += 1
        mode = self.rng.choice(["process", "process", "thread"])
        return subprocess.Popen(
            [sys.executable, "training.py", str(self.life), mode],
            cwd=self.root,
            env={
                **os.environ,
                "CIRRON_API_KEY": platform_server.KEY,
                "CIRRON_API_ENDPOINT": f"http://127.0.0.1:{self.port}",
            },
            stdout=subprocess.DEVNULL,
            stderr=self.log,
        )

    def strike(self) -> None:
        """Kill one of them, at a bad moment, and start it again."""
        victim = self.rng.choice(list(self.killed))
        if victim == "platform":
            self.platform.kill()
            self.platform.wait()
            time.sleep(self.rng.uniform(0, 0.5))
            self.platform = self.start_platform("--chaos", str(self.rng.randrange(10**6)))
        elif victim == "training":
            self.kill_training()
            self.training = self.start_training()
        else:
            with contextlib.suppress(psutil.Error):
                helpers = psutil.Process(self.training.pid).children()
                if not helpers:
                    return
                helpers[0].kill()
        self.killed[victim] += 1

    def kill_training(self) -> None:
        """Kill it, and remember who is left of it."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.training.pid)
            process.suspend()  # it starts no helper between the look and the kill
            self.helpers += process.children()
        self.training.kill()
        self.training.wait()

    def certain(self) -> set[str]:
        """The names of the steps that were on disk for certain."""
        lines = [path.read_text().split("\n")[:-1] for path in self.root.glob("certain-*")]
        return {line for of_life in lines for line in of_life}

    def settle(self) -> None:
        """End the training when it has recorded something, and have a platform that behaves.

        Nobody writes into the spool any more after that.
        """
        wait_until(lambda: (self.root / f"certain-{self.life}").exists() and bool(self.certain()))
        self.kill_training()
        wait_until(lambda: all(map(has_ended, self.helpers)))
        self.platform.kill()
        self.platform.wait()
        self.platform = self.start_platform()
        wait_until(self.platform_listens)

    def platform_listens(self) -> bool:
        """Whether it does; started again where another process had its port for a moment."""
        if self.platform.poll() is not None:
            self.platform = self.start_platform()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 5):
            return self.platform.poll() is None
        return False

    def close(self) -> None:
        """Kill everything."""
        for process in (self.training, self.platform):
            process.kill()
            process.wait()
        self.log.close()


def has_ended(process: psutil.Process) -> bool:
    """Whether a process is gone, though nobody may have asked for its status."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.timeout(SECONDS + 4 * HURRY_S)
def test_everything_arrives_once_whatever_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row of the spool is at the platform under one batch id, as it was written."""
    seed = int(os.environ.get("CHAOS_SEED", random.SystemRandom().randrange(10**6)))
    sys.stdout.write(f"CHAOS_SEED={seed}\n")
    rng = random.Random(seed)
    scene = Scene(tmp_path, rng)
    try:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            time.sleep(rng.uniform(0.3, 2.0))
            scene.strike()
        scene.settle()
        monkeypatch.setenv("CIRRON_API_KEY", platform_server.KEY)
        monkeypatch.setenv("CIRRON_API_ENDPOINT", f"http://127.0.0.1:{scene.port}")
        command = ["spool", "flush", "--dir", str(tmp_path / ".cirron")]
        assert main([*command, "--patience", str(HURRY_S)]) == 0
    finally:
        scene.close()

    files = {p.stem.rpartition("-")[2]: p for p in (tmp_path / ".cirron/spool").glob("*.json")}
    stored = {path.stem: path for path in scene.store.glob("*.json")}
    assert set(stored) == set(files)
    assert all(stored[name].read_bytes() == path.read_bytes() for name, path in files.items())

    spans: list[str] = []
    steps: set[str] = set()
    for path in stored.values():
        rows = json.loads(path.read_bytes())["spans"]
        spans += [row["id"] for row in rows]
        steps |= {row["attrs"]["key"] for row in rows if row["name"] == "step"}
    certain = scene.certain()
    assert certain
    assert certain <= steps
    assert len(spans) == len(set(spans)) == len({row.id for row in read_spool(".cirron").spans})
    sys.stdout.write(f"{len(spans)} spans in {len(stored)} batches; killed: {scene.killed}\n")
