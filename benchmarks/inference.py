"""Measure inference: ``make bench-inference``.

    benchmarks/inference.py                   everything
    benchmarks/inference.py --quick           few and short rounds, to see that it runs
    benchmarks/inference.py --only call       some groups
    benchmarks/inference.py --check           ends with 1 when a "must" is missed

The sides of a group are processes that take turns; see benchmarks/harness.py. A decorated call is
drained to disk within its time, as a scope is in benchmarks/hot_path.py; the OTel side is
``start_as_current_span`` with three attributes and a batch processor.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from groups import measure_groups
from harness import (
    Bench,
    Result,
    Row,
    _resident_bytes,
    child,
    expect_rows,
    load,
    median_excess,
    median_of,
    median_ratio,
    microseconds,
    quantity,
    spool_rows,
)

SCRIPT = Path(__file__).name
WARM_UP = 2_000
_ATTRS = {"request_id": "0123456789abcdef0123456789abcdef", "kind": "inference", "by": "us"}
Headers = list[tuple[str, str]]
#: What an instrumented client sends, among what every client does.
_HEADERS: Headers = [
    ("host", "127.0.0.1:8000"), ("user-agent", "python-httpx/0.28.1"), ("accept", "*/*"),
    ("accept-encoding", "gzip, deflate"), ("content-type", "application/json"),
    ("content-length", "64"), ("x-request-id", "load-1"),
    ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
]  # fmt: skip


# --- a call ---------------------------------------------------------------------------------------


def library(side: str) -> Any:  # noqa: ANN401 - ours or the peer's module
    """The library of a side, recording, without hooks."""
    ci = load("cirron_otel" if side == "ours" else "cirron")
    ci.profile(frameworks=[])
    return ci


def timed(n: int, run: Callable[[int], object], flush: Callable[[], object]) -> Result:
    """Microseconds per call with the final flush, and of CPU in all threads."""
    run(WARM_UP)
    flush()
    cpu, begin = time.process_time_ns(), time.perf_counter_ns()
    run(n)
    looped = time.perf_counter_ns()
    flush()
    end = time.perf_counter_ns()
    return {
        "us": (end - begin) / n / 1e3,
        "loop_us": (looped - begin) / n / 1e3,
        "cpu_us": (time.process_time_ns() - cpu) / n / 1e3,
    }


def call_sync(side: str, n: int, headers: Headers | None = None) -> Result:
    """``n`` calls of a decorated function that does nothing; its requests have these headers."""
    ci = library(side)

    @(ci.inference if headers is None else ci.inference(headers=lambda: headers))
    def predict() -> None:
        return None

    def run(count: int) -> None:
        for _ in range(count):
            predict()

    result = timed(n, run, ci.flush)
    ci.shutdown()
    return result


def call_async(side: str, n: int) -> Result:
    """The same for a coroutine function, in one event loop."""
    ci = library(side)

    @ci.inference
    async def predict() -> None:
        return None

    async def many(count: int) -> None:
        for _ in range(count):
            await predict()

    result = timed(n, lambda count: asyncio.run(many(count)), ci.flush)
    ci.shutdown()
    return result


def call_otel(n: int, headers: Headers | None = None) -> Result:
    """The OTel SDK: ``n`` spans with three attributes each, the batch processor drained.

    With ``headers`` its propagator reads the caller from them, else they are roots.
    """
    made, exporter = load("peers").provider(n)
    tracer, extract = made.get_tracer("bench"), load("opentelemetry.propagate").extract

    def run(count: int) -> None:
        for _ in range(count):
            context = None if headers is None else extract(dict(headers))
            with tracer.start_as_current_span("request", context, attributes=_ATTRS):
                pass

    result = timed(n, run, made.force_flush)
    made.shutdown()
    return {**result, "spans": {"request": exporter.spans}}


def measure_call(bench: Bench) -> list[Row]:
    """A decorated call that does nothing, sync and async."""
    n = bench.pick(50_000, 5_000)
    rows = []
    for kind in ("sync", "async"):
        sides = [f"ours-{kind}", f"cirron-sdk-{kind}", "otel"]
        done = bench.rounds(kind, SCRIPT, sides, bench.pick(11, 2), {"n": n}, _inspect)
        for side in sides:
            # cirron-sdk drops a request of an event loop's now and then.
            lack = n // 1000 if side.startswith("cirron-sdk") else 0
            expect_rows(done, side, "spans", "request", n + WARM_UP, may_lack=lack)
        ours = microseconds(median_of(done, sides[0]))
        for peer, must, goal in ((sides[1], 0.6, 0.3), (sides[2], 1 / 4, 1 / 8)):
            label = f"{peer} {microseconds(median_of(done, peer))}"
            ratio = median_ratio(done, sides[0], peer)
            cpu = median_ratio(done, sides[0], peer, "cpu_us")
            rows.append(
                Row(f"decorated call, {kind}, drained", ours, label, ratio, "x", must, goal,
                    note=f"of {peer}, in CPU time of all threads {cpu:.3f}")
            )  # fmt: skip
    return rows


def measure_caller(bench: Bench) -> list[Row]:
    """A decorated call whose headers name a trace."""
    n = bench.pick(50_000, 5_000)
    sides = ["ours-caller", "ours-sync", "otel-caller"]
    done = bench.rounds("caller", SCRIPT, sides, bench.pick(11, 2), {"n": n}, _inspect)
    for side in sides:
        expect_rows(done, side, "spans", "request", n + WARM_UP)
    more = median_ratio(done, sides[0], sides[1], "cpu_us")
    row = Row(
        "decorated call with a caller's headers, drained",
        microseconds(median_of(done, sides[0])),
        f"{sides[2]} {microseconds(median_of(done, sides[2]))}",
        median_ratio(done, sides[0], sides[2]),
        "x",
        1 / 4,
        1 / 8,
        note=f"of {sides[2]}; in CPU time {more:.2f} of a call without headers",
    )
    return [row]


def _inspect(directory: Path) -> Result:
    """What is in the spool; a side without one has counted for itself."""
    return spool_rows(directory) if (directory / ".cirron").exists() else {}


# --- open streams -----------------------------------------------------------------------------


def _resident() -> int:
    gc.collect()
    return _resident_bytes(os.getpid())


def open_streams(side: str, n: int) -> Result:
    """Bytes per async stream that has given two chunks and waits, of ``n`` at once."""
    decorate: Callable[[Any], Any] = (lambda fn: fn) if side == "plain" else library(side).inference

    @decorate
    async def stream() -> AsyncIterator[str]:
        while True:
            yield "token"

    async def main() -> float:
        held: list[Any] = [None] * n
        warm = stream()
        await anext(warm)
        before = _resident()
        for number in range(n):
            held[number] = one = stream()
            await anext(one)
            await anext(one)
        grown = _resident() - before
        for one in (*held, warm):
            await one.aclose()
        return grown / n

    grown = asyncio.run(main())
    if side != "plain":
        load("cirron_otel").shutdown()
    return {"bytes": grown}


def measure_streams(bench: Bench) -> list[Row]:
    """Memory per open request, over what the generator itself takes."""
    n = bench.pick(10_000, 10_000)
    sides = ["ours-streams", "plain-streams"]
    done = bench.rounds("streams", SCRIPT, sides, bench.pick(5, 1), {"n": n}, _inspect)
    expect_rows(done, sides[0], "spans", "request", n + 1)
    ours, plain = (median_of(done, side, "bytes") for side in sides)
    return [
        Row(
            f"{n:,} open streams, memory each",
            quantity(ours / 1000, "kB"),
            f"the generator alone {quantity(plain / 1000, 'kB')}",
            median_excess(done, *sides, "bytes") / 1000,
            "kB",
            4,
            2,
        )
    ]


# --- running it -----------------------------------------------------------------------------------


def measure_service(bench: Bench) -> list[Row]:
    """A real service at saturation; see benchmarks/inference_service.py."""
    rows: list[Row] = load("inference_service").measure_service(bench)
    return rows


GROUPS: dict[str, Callable[[Bench], list[Row]]] = {
    "call": measure_call,
    "caller": measure_caller,
    "streams": measure_streams,
    "service": measure_service,
}
SIDES: dict[str, Callable[..., Result]] = {
    "ours-sync": lambda n: call_sync("ours", n),
    "ours-async": lambda n: call_async("ours", n),
    "cirron-sdk-sync": lambda n: call_sync("cirron-sdk", n),
    "cirron-sdk-async": lambda n: call_async("cirron-sdk", n),
    "ours-caller": lambda n: call_sync("ours", n, _HEADERS),
    "otel": call_otel,
    "otel-caller": lambda n: call_otel(n, _HEADERS),
    "ours-streams": lambda n: open_streams("ours", n),
    "plain-streams": lambda n: open_streams("plain", n),
}


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in SIDES:
        child(SIDES)
    else:
        sys.exit(measure_groups("Measure inference, sides in turn.", GROUPS))
