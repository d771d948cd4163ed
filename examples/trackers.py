"""Log to TensorBoard as ever, with every value in the run's own record as well; then the other way.

The training knows nothing of us but ``tee="tensorboard"``. The tracker "goes out" half way (its
folder is taken away and cannot be written any more), which does not end the training. Needs
``pip install 'cirron-otel[tensorboard,torch]'``; nothing is downloaded.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from torch.utils.tensorboard import SummaryWriter

import cirron_otel as ci
from cirron_otel.sinks.tensorboard import TensorBoardSink

place = Path(tempfile.mkdtemp())
profiler = ci.profile(tee="tensorboard", path=place / "cirron")

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.05)
inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=32)

writer = SummaryWriter(str(place / "theirs"), max_queue=1, flush_secs=1)
step = 0
for epoch in ci.epochs(range(3)):
    if epoch == 1:
        writer.close()
        shutil.rmtree(place / "theirs")
        (place / "theirs").write_text("no folder any more")
    for batch, target in ci.batches(loader):
        loss = torch.nn.functional.mse_loss(model(batch), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        writer.add_scalar("loss", loss, step)
        step += 1

print("tee:", profiler.health()["tee"])
ci.trace()
ci.shutdown()

with TensorBoardSink(place / "ours", place / "cirron") as sink:
    print(sink.update(), "points for tensorboard --logdir", place / "ours")
