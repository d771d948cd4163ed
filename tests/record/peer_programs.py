"""Programs that run in the environment of the existing monitor, which is not ours.

They are texts, so that nothing here imports what only that environment has.
"""

#: stdin: JSON list of [record, key or null]; stdout: for each the statuses by check, in order.
VERIFY = """
import json, sys
from ormas_monitor.record import verify_run
found = []
for path, key in json.load(sys.stdin):
    result = verify_run(path, key)
    found.append({check.name: check.status for check in result.checks})
print(json.dumps(found))
"""

#: argv: directory, seed. A run in which anything may happen to loss and gradients.
TRAIN = """
import math, random, sys
import torch
from ormas_monitor import Monitor, MonitorConfig
out, seed = sys.argv[1], int(sys.argv[2])
draw = random.Random(seed)
torch.manual_seed(seed)
nn = torch.nn
model = nn.Sequential(
    nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
config = MonitorConfig(check_every=draw.choice([1, 2]), warmup=draw.choice([0, 3, 8]),
                       alarm_confirmations=draw.choice([1, 2]), sigma=draw.choice([1.5, 2.5]))
mode = "calm"
with Monitor(model, optimizer, out=out, config=config, verbose=False) as monitor:
    for step in range(160):
        if draw.random() < 0.15:
            mode = draw.choice(["calm", "small", "large", "zero", "nan", "inf", "none", "one"])
        optimizer.zero_grad()
        loss = model(torch.randn(4, 1, 8, 8)).square().mean()
        loss.backward()
        value = loss.item()
        for index, parameter in enumerate(model.parameters()):
            if mode == "none" or (mode == "one" and index < 2):
                parameter.grad = None
            elif mode in ("small", "large"):
                parameter.grad *= 1e-6 if mode == "small" else 1e6
            elif mode == "zero":
                parameter.grad.zero_()
            elif mode in ("nan", "inf") and draw.random() < 0.7:
                parameter.grad.view(-1)[0] = float(mode)
        if draw.random() < 0.08:
            value = draw.choice([math.nan, math.inf, -math.inf, 1e3, -5.0, 0.0])
        if draw.random() < 0.03:
            with torch.no_grad():
                model[0].weight[: draw.choice([1, 2, 4])] = 0.0
                model[0].bias[:] = 0.0
                model[1].bias[:] = -0.1
        monitor.step(None if draw.random() < 0.03 else value)
        if mode == "calm":
            optimizer.step()
"""
