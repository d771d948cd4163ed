"""What a training did before its first step: the scope `startup`, where parts of it were seen."""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.data import DataLoader, Dataset, dataloader

import cirron_otel as ci
from cirron_otel import semconv
from cirron_otel.run import startup
from helpers import Rows, finished, tree_text

if TYPE_CHECKING:
    import pytest


class Data(Dataset[torch.Tensor]):
    """Four items."""

    def __len__(self) -> int:
        """How many there are."""
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        """One of them."""
        return torch.ones(8)


class Model(nn.Module):
    """Two layers, with a pause in between."""

    def __init__(self) -> None:
        """Make them."""
        super().__init__()
        self.first = nn.Linear(8, 4)
        time.sleep(0.3)  # one model, however long it takes
        self.second = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        out: torch.Tensor = self.second(self.first(x))
        return out


def length(rows: Rows, name: str) -> float:
    """How long the only scope of a name took, in s."""
    row = rows.one(name)
    assert isinstance(row.end_ns, int)
    return (row.end_ns - row.start_ns) / 1e9


def test_the_parts_of_a_startup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process group, model and workers lie in a scope that ends with the first step.

    What has a scope of its own anyway stands beside it.
    """
    monkeypatch.setattr(startup, "TOGETHER_NS", 50_000_000)
    ci.profile(snapshots=None, otlp="none")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.save(model.state_dict(), io.BytesIO())
        for x in DataLoader(Data(), batch_size=2, num_workers=1):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            nn.Linear(2, 2)  # no startup any more
    finally:
        dist.destroy_process_group()
    rows = finished()
    tree = tree_text(rows, startup=True).splitlines()
    assert tree[:6] == [
        "cirron.session", "  startup", "    init", "    model", "    loader", "  checkpoint",
    ]  # fmt: skip
    whole, first = rows.one("startup"), rows.named("step")[0]
    assert whole.start_ns == rows.one(semconv.SESSION).start_ns
    assert whole.end_ns == first.start_ns
    assert length(rows, "model") >= 0.3
    assert "startup" not in tree_text(rows)


def test_nothing_seen_no_scope() -> None:
    """A model that was there before, or no torch at all, is no startup to speak of."""
    model = nn.Linear(2, 1)
    ci.profile(otlp="none")
    for x in ci.batches(torch.ones(3, 2)):
        model(x).sum().backward()
    assert finished().named(semconv.STARTUP) == []


def test_torch_is_as_it_was() -> None:
    """The hooks are gone with the recording."""
    before = vars(dataloader._MultiProcessingDataLoaderIter)["__init__"]
    group = torch.distributed.init_process_group
    hooks = dict(torch_module._global_parameter_registration_hooks)
    ci.profile(otlp="none")
    assert vars(dataloader._MultiProcessingDataLoaderIter)["__init__"] is not before
    assert len(torch_module._global_parameter_registration_hooks) == len(hooks) + 1
    ci.shutdown()
    assert vars(dataloader._MultiProcessingDataLoaderIter)["__init__"] is before
    assert torch.distributed.init_process_group is group
    assert torch_module._global_parameter_registration_hooks == hooks
