"""Writes spools by hand for the tests of the readers: rows in, batch files out."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from cirron_otel.batch import Batch, MarkRecord, SpanRecord, encode
from cirron_otel.spool import Spool

#: 2026-11-29 12:00:00 UTC.
T0 = 1_795_953_600_000_000_000
MS = 1_000_000
S = 1_000_000_000


def hex32(key: str) -> str:
    """An id that is the same for the same key.

    The second half of the ids ``a/x`` and ``a/y`` is the same, as it is within one trace of ours;
    without a slash the whole id is arbitrary, as other SDKs make them.
    """
    trace, slash, _ = key.partition("/")
    digest = hashlib.sha256(key.encode()).hexdigest()
    half = hashlib.sha256(trace.encode()).hexdigest()[:16] if slash else digest[16:32]
    return digest[:16] + half


def span(
    key: str, name: str, parent: str | None, start: float, end: float | None, **fields: Any
) -> SpanRecord:
    """A span from ``start`` to ``end``, in milliseconds after :data:`T0`; ``None`` is open."""
    row = SpanRecord(
        id=hex32(key),
        name=name,
        parent_id=None if parent is None else hex32(parent),
        index=None,
        start_ns=T0 + round(start * MS),
        pid=100,
        rank=0,
        thread_id=1,
    )
    if end is not None:
        row.end_ns = T0 + round(end * MS)
    for field, value in fields.items():
        setattr(row, field, value)
    return row


def mark(
    key: str, name: str, value: float | str | None, at: float = 0, **fields: Any
) -> MarkRecord:
    """A mark on the span ``key`` (or on the literal ``"root"``), at milliseconds after T0."""
    owner = key if key == "root" else hex32(key)
    kind = {float: "float", bool: "bool", int: "int", str: "string"}.get(type(value), "float")
    ts_ns = T0 + round(at * MS)
    row = MarkRecord(hex32(f"{key}{name}{at}"), owner, name, kind, value, {}, ts_ns, "point")
    for field, content in fields.items():
        setattr(row, field, content)
    return row


class Writer:
    """Writes batches into ``<root>/spool``, one a call."""

    def __init__(
        self, root: Path, *, session: str | None = None, writer: str | None = None
    ) -> None:
        self.spool = Spool(root)
        self.session = session
        self.writer = writer

    def batch(
        self,
        at: float,
        spans: list[SpanRecord],
        marks: list[MarkRecord] | None = None,
        **fields: Any,
    ) -> Path:
        """One batch created ``at`` milliseconds after T0."""
        created_ns = T0 + round(at * MS)
        batch = Batch(
            1, "9.9.9", hex32(f"{at}{self.writer}{self.session}"), created_ns, spans, marks or []
        )
        if self.session is not None:
            batch.resource = {
                "cirron.session.id": hex32(self.session),
                "cirron.run.id": "digits-cnn",
            }
        if self.writer is not None:
            batch.writer = self.writer
        for field, value in fields.items():
            setattr(batch, field, value)
        self.spool.write([encode(batch)], created_ns=created_ns, batch_id=batch.batch_id)
        return self.spool.directory / f"{created_ns:020d}-{batch.batch_id}.json"


def training(
    root: Path, *, epochs: int = 2, steps: int = 20, close: bool = True, **writer: Any
) -> Writer:
    """A small training run: session, epochs, steps with their phases and losses."""
    write = Writer(root, **{"session": "session", "writer": "host-100-1", **writer})
    step_ms = 50.0
    at = 10.0
    for e in range(epochs):
        begun, spans, marks = at, [], []
        for k in range(steps):
            key = f"step{e}.{k}"
            for phase, (a, b) in {
                "data_load": (0, 5),
                "forward": (5, 20),
                "backward": (20, 40),
                "optimizer_step": (40, 49),
            }.items():
                spans.append(span(f"{key}.{phase}", phase, key, at + a, at + b))
            loss = 2.3 / (1 + 0.2 * (e * steps + k))
            marks.append(mark(key, "loss", loss, at + 45))
            marks.append(mark(key, "cirron.overhead_ns", 4200, at + 49))
            spans.append(span(key, "step", f"epoch{e}", at, at + step_ms, index=k))
            at += step_ms
        marks.append(mark(f"epoch{e}", "val_accuracy", 0.85 + 0.06 * e, at, kind="summary"))
        spans.append(span(f"epoch{e}", "epoch", "session", begun, at, index=e, attrs={"lr": 0.01}))
        still = [span("session", "cirron.session", None, 0, None)]
        write.batch(at, spans, marks, open=still)
    if close:
        attrs = {"cirron.run_id": "digits-cnn", "framework": "torch", "device": "cpu"}
        write.batch(
            at + 10,
            [span("session", "cirron.session", None, 0, at + 5, attrs=attrs)],
            [mark("session", "accuracy", 0.93, at, kind="summary")],
            open=[],
        )
    return write
