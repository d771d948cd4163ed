"""Distributed training: two real processes over gloo."""

from __future__ import annotations

import pytest

from helpers import RunProgram, on_two_ranks, tree_text

PROGRAM = """
    def train():
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
        import cirron_otel as ci

        dist.init_process_group("gloo")
        ci.profile()
        torch.manual_seed(0)
        data = TensorDataset(torch.ones(16, 2))
        loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
        model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (x,) in loader:
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
            ci.mark("loss", loss)
        ci.shutdown()
        dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_ranks_in_one_directory(run_program: RunProgram) -> None:
    """Each rank writes its own whole tree, its rank on every span."""
    run = run_program(on_two_ranks(PROGRAM), {"CIRRON_RUN_ID": "shared"})
    assert len(run.named("cirron.session")) == 2
    for rank in range(2):
        spans = [span for span in run.spans if span.rank == rank]
        assert len(spans) == 1 + 2 + 1 + 2 * 6
        names = {span.name for span in spans}
        assert names == {
            *("cirron.session", "startup", "model", "epoch", "step"),
            *("data_load", "forward", "backward", "collective_wait", "optimizer_step"),
        }
        assert len({span.pid for span in spans}) == 1
        session = next(span for span in spans if span.parent_id is None)
        assert session.attrs["world_size"] == 2
        assert session.attrs["cirron.run_id"] == "shared"
    tree = tree_text(run)
    first, second = tree.split("cirron.session")[1:]
    assert first.strip() == second.strip()
