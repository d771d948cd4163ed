"""Record two steps of a training with torch's profiler, and see what took the time in them.

``ci.profile_window`` can be called at any time, and ``ci.profile(profile_on=...)`` calls it after a
finding. Needs ``pip install 'cirron-otel[torch]'``; nothing is downloaded.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

import cirron_otel as ci

#: The first steps are not like the others.
FIRST = 3

place = Path(tempfile.mkdtemp())
ci.profile(path=place)

layer = torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
batches = [torch.randn(8, 32, 64) for _ in range(6)]

for number, batch in enumerate(ci.batches(batches)):
    if number == FIRST - 1:
        window = ci.profile_window(steps=2)
    optimizer.zero_grad()
    layer(batch).square().mean().backward()
    optimizer.step()

ci.trace()
ci.shutdown()

while not window.done and window.error is None:  # another thread writes the file
    time.sleep(0.05)
if window.file is None or window.error is not None:
    raise SystemExit(f"nothing was recorded: {window.error}")
trace = json.loads(gzip.decompress(window.file.read_bytes()))
print(f"\n{window.file.name}, for https://ui.perfetto.dev")
times: Counter[str] = Counter()
for event in trace["traceEvents"]:
    if event.get("ph") == "X" and event.get("cat") in {"cpu_op", "kernel"}:
        times[event["name"]] += event["dur"]
for name, microseconds in times.most_common(5):
    print(f"{microseconds / 1000:9.2f} ms  {name}")
