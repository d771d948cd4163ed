"""One run, several receivers: each gets everything, at its own pace, from the spool.

    python examples/fan_out.py http://localhost:4318 grpc://localhost:4317

Without an argument it sends to a collector on this machine (``http://localhost:4318``). A receiver
that is away costs the training nothing: what it has not got stays in ``.cirron`` and goes out with
the next run in this directory, by ``cirron-otel spool flush``, or by
``cirron-otel traces replay --otlp URL``.
"""

from __future__ import annotations

import random
import sys

import cirron_otel as ci

EPOCHS = 5
BATCHES = 200


def main(receivers: list[str]) -> None:
    """Fit a line by gradient descent, and say what each receiver has got."""
    profiler = ci.profile(frameworks=[], otlp=receivers or ["http://localhost:4318"])
    slope, offset = train()
    print(f"y = {slope:.2f} x + {offset:.2f}")
    profiler.shutdown()
    for destination in profiler.health()["destinations"]:
        print(
            f"{destination['description']}: {destination['delivered']} batches delivered, "
            f"{destination['queue_batches']} waiting"
            + (f" ({destination['last_error']})" if destination["last_error"] else "")
        )


def train() -> tuple[float, float]:
    """Five epochs over noisy points of y = 2 x + 1."""
    numbers = random.Random(0)  # noqa: S311 - noise, no secret
    points = [
        [(x := numbers.uniform(-1, 1), 2 * x + 1 + numbers.gauss(0, 0.1)) for _ in range(16)]
        for _ in range(BATCHES)
    ]
    slope = offset = 0.0
    for _ in ci.epochs(range(EPOCHS)):
        for batch in ci.batches(points):
            with ci.scope("forward"):
                errors = [(slope * x + offset - y, x) for x, y in batch]
            with ci.scope("optimizer_step"):
                slope -= 0.2 * sum(error * x for error, x in errors) / len(errors)
                offset -= 0.2 * sum(error for error, _ in errors) / len(errors)
            ci.mark("loss", sum(error * error for error, _ in errors) / len(errors))
        ci.mark("slope", slope, kind="summary")
    return slope, offset


if __name__ == "__main__":
    main(sys.argv[1:])
