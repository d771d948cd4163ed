"""Asks the service beside it, many requests at a time, each in a trace of its own.

.venv/bin/python examples/inference_service/load.py --requests 500 --at-once 8
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time

import httpx

TEXTS = (
    "The cat sits outside.",
    "A man is playing guitar.",
    "The new movie is awesome, and everybody should see it before it is gone from the cinemas.",
)


async def ask(client: httpx.AsyncClient, number: int) -> float:
    """One request; its length in seconds."""
    # What an instrumented client would send: this trace, this span, sampled.
    headers = {
        "traceparent": f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-01",
        "x-request-id": f"load-{number}",
    }
    begun = time.perf_counter()
    body = {"input": [TEXTS[number % len(TEXTS)], TEXTS[0]]}
    answer = await client.post("/v1/embeddings", json=body, headers=headers)
    answer.raise_for_status()
    return time.perf_counter() - begun


async def run(url: str, requests: int, at_once: int) -> None:
    """Ask, and print how fast the answers came."""
    numbers = iter(range(requests))
    lengths: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:

        async def one_after_another() -> None:
            lengths.extend([await ask(client, number) for number in numbers])

        begun = time.perf_counter()
        await asyncio.gather(*(one_after_another() for _ in range(at_once)))
        took = time.perf_counter() - begun
    p95 = statistics.quantiles(lengths, n=20)[-1] if len(lengths) > 1 else lengths[0]
    print(
        f"{requests} requests, {requests / took:.1f} a second, median "
        f"{statistics.median(lengths) * 1e3:.1f} ms, p95 {p95 * 1e3:.1f} ms"
    )


def main() -> None:
    """Read what to do from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--at-once", type=int, default=4)
    given = parser.parse_args()
    asyncio.run(run(given.url, given.requests, given.at_once))


if __name__ == "__main__":
    main()
