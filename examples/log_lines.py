"""A program's own log lines, each with the run, step and span it was written in.

One of them is what a service that collects logs makes of the fields, as JSON. At the end
memory runs out, which is a finding with the largest tensors. Needs ``pip install torch``.
"""

from __future__ import annotations

import json
import logging
import sys

import torch

import cirron_otel as ci


class AsJson(logging.Formatter):
    """A formatter that writes the fields that we add."""

    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON."""
        fields = ("run_id", "rank", "epoch", "iteration", "trace_id", "span_id")
        return json.dumps(
            {"message": record.getMessage()} | {f: getattr(record, f) for f in fields}
        )


log = logging.getLogger("training")
log.setLevel(logging.INFO)
for formatter in (
    logging.Formatter("%(levelname)s %(message)s run=%(run_id)s it=%(iteration)s span=%(span_id)s"),
    AsJson(),
):
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(formatter)
    handler.addFilter(ci.logging_filter())
    log.addHandler(handler)

ci.profile(run_id="example")
model = ci.watch(torch.nn.Linear(512, 512))
log.info("starting")
for _ in ci.epochs(range(1)):
    for size in ci.batches([4, 8]):
        log.info("loss %.3f", model(torch.randn(size, 512)).square().mean().item())
    try:
        with ci.scope("too_large"):
            torch.empty(1 << 58)
    except RuntimeError:
        log.info("that was too much")
ci.shutdown()
