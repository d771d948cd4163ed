"""An hour of requests in a few minutes: memory must stay flat. ``make soak-inference``.

36,000 requests (ten a second for an hour) of every kind and every way to end: plain calls, failed
ones, streams that are read, left, dropped and never started, in tasks and in threads, with callers
and without. After a quarter of them the resident memory is taken as the base; at the end it may be
``--allow`` MB above it. Everything must have been recorded, nothing lost, and no trace be larger
than its limit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

from harness import _resident_bytes

import cirron_otel as ci

CALLER = "00-{:032x}-b7ad6b7169203331-01"
_ROUND = 40
_LEAVE_AFTER = 2


@ci.inference(headers=lambda number: {"traceparent": CALLER.format(number + 1)})
def called(number: int) -> int:
    """A call with a caller, and a scope inside."""
    with ci.scope("model"):
        ci.mark("score", number)
    return number


@ci.inference
def fails() -> None:
    """A call that fails."""
    raise ValueError("x")


@ci.inference
def stream(count: int) -> Iterator[str]:
    """A stream."""
    for _ in range(count):
        yield "token"


@ci.inference
async def astream(count: int) -> AsyncIterator[str]:
    """An async stream."""
    for _ in range(count):
        await asyncio.sleep(0)
        yield "token"


async def read(count: int, *, leave: bool) -> None:
    """Read an async stream to its end, or leave it."""
    got = astream(count)
    seen = 0
    async for _ in got:
        seen += 1
        if leave and seen == _LEAVE_AFTER:
            break
    if leave:
        await got.aclose()  # type: ignore[attr-defined]


async def one_round(pool: ThreadPoolExecutor, number: int) -> None:
    """Forty requests."""
    loop = asyncio.get_running_loop()
    jobs = [loop.run_in_executor(pool, called, number + i) for i in range(10)]
    jobs += [loop.run_in_executor(pool, list, stream(20)) for _ in range(6)]
    tasks = [asyncio.create_task(read(20, leave=i % 2 == 0)) for i in range(10)]
    for _ in range(6):
        with contextlib.suppress(ValueError):
            fails()
    for _ in range(4):
        stream(5)
        left = stream(5)
        next(left)
        del left
    await asyncio.gather(*jobs, *tasks)


async def soak(total: int, samples: list[int]) -> int:
    """All rounds; how many requests were made."""
    made = 0
    with ThreadPoolExecutor(4) as pool:
        while made < total:
            await one_round(pool, made)
            made += _ROUND
            if made % (total // 20 // _ROUND * _ROUND) == 0:
                gc.collect()
                samples.append(_resident_bytes(os.getpid()))
    return made


def main() -> int:
    """Run it and say what became of the memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=36_000)
    parser.add_argument("--allow", type=float, default=3.0, help="MB above the base")
    options = parser.parse_args()
    samples: list[int] = []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        ci.profile(frameworks=[], path=directory, flush_interval=0.5)
        made = asyncio.run(soak(options.requests, samples))
        ci.flush()
        health = ci.health()
        ci.shutdown()
    base = samples[len(samples) // 4]
    grown = (samples[-1] - base) / 1e6
    print(
        f"{made:,} requests in {time.monotonic() - begun:.0f} s; memory "
        f"{base / 1e6:.1f} MB after a quarter, {grown:+.1f} MB at the end; "
        f"lost {health['losses']}, swallowed {health['swallowed_errors']}, "
        f"open {health['open_scopes']}"
    )
    bad = health["losses"] or health["swallowed_errors"] or health["open_scopes"] != 1
    return 1 if bad or grown > options.allow else 0


if __name__ == "__main__":
    sys.exit(main())
