"""A training in which anything may happen, for either monitor: the same seeds, the same numbers.

It is a text, as it runs in environments of which this one is only one.
"""

#: argv: package of ``Monitor`` and ``MonitorConfig``, directory, seed, steps.
TRAIN = """
import importlib, math, random, sys
import torch
package, out, seed, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
home = importlib.import_module(package)
torch.set_num_threads(1)
draw = random.Random(seed)
torch.manual_seed(seed)
nn = torch.nn

class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=draw.random() < 0.5)
        self.last = nn.ReLU()

    def forward(self, x):
        return self.last(x + self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))

model = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), Residual(8), nn.AdaptiveAvgPool2d(2),
    nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4),
)
kind = draw.choice(["sgd", "momentum", "adam", "adamw"])
optimizer = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=5e-4),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}[kind](model.parameters())
scaler = torch.amp.GradScaler("cpu", enabled=draw.random() < 0.3)
config = home.MonitorConfig(
    check_every=draw.choice([1, 2, 3]), warmup=draw.choice([0, 3, 8]), patience=draw.choice([2, 4]),
    alarm_confirmations=draw.choice([1, 2]), sigma=draw.choice([1.5, 2.5]), repair_seed=seed,
)
repair = draw.choice([False, False, True, "all"])
convs = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
MODES = ["calm", "calm", "small", "large", "zero", "nan", "inf", "none", "one"]
mode = "calm"
with home.Monitor(model, optimizer, out=out, config=config, verbose=False,
                  repair=repair, scaler=scaler if scaler.is_enabled() else None) as monitor:
    for step in range(steps):
        if draw.random() < 0.12:
            mode = draw.choice(MODES)
        optimizer.zero_grad()
        x, y = torch.randn(8, 1, 10, 10), torch.randint(0, 4, (8,))
        loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        for index, parameter in enumerate(model.parameters()):
            if mode == "none" or (mode == "one" and index < 2):
                parameter.grad = None
            elif mode in ("small", "large"):
                parameter.grad *= 1e-6 if mode == "small" else 1e6
            elif mode == "zero":
                parameter.grad.zero_()
            elif mode in ("nan", "inf") and draw.random() < 0.7:
                parameter.grad.view(-1)[0] = float(mode)
        with torch.no_grad():
            if draw.random() < 0.05 and step:
                draw.choice(convs).weight[: draw.choice([1, 3, 8])] = draw.choice([0.0, 1e-9])
            if draw.random() < 0.03:
                draw.choice(norms).bias[: draw.choice([1, 4, 8])] = draw.choice([-5.0, 0.3])
            if draw.random() < 0.03 and step:
                draw.choice(norms).weight[: draw.choice([1, 4])] = draw.choice([0.0, 1e-9])
            if draw.random() < 0.03:
                for m in (*convs, *norms):
                    m.reset_parameters()
        given = loss
        if draw.random() < 0.06:
            given = draw.choice([math.nan, math.inf, 1e3, -5.0, torch.tensor([1.0, 2.0]), None])
        monitor.step(given)
        if mode in ("calm", "small") or (scaler.is_enabled() and mode != "none"):
            scaler.step(optimizer)
            scaler.update()
"""
