"""What tests of services share: asking an application in this process, and how its spans ended."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

import cirron_otel as ci
from cirron_otel import semconv
from cirron_otel.batch import SpanRecord
from helpers import Rows, read_spool


def ask(app: Any, path: str, method: str = "GET", **more: Any) -> httpx.Response:
    """One request to an application; its exceptions become answers of 500, as with a server."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.request(method, path, **more)

    return asyncio.run(run())


def recorded() -> Rows:
    """What was recorded, all of it; nothing is open."""
    assert ci.health()["open_scopes"] <= 1
    assert ci.shutdown()
    return read_spool()


def status_of(row: SpanRecord) -> tuple[Any, Any]:
    """A span's status and its error: its type, or the exception it names."""
    assert row.otel
    said = row.attrs.get(semconv.ERROR_TYPE, row.attrs.get(semconv.ERROR))
    return row.otel.status or None, said
