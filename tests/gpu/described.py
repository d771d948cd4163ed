# mypy: disable-error-code="no-untyped-call"
"""What has to be so of statistics made on a GPU: checks as in ``correct.py``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cirron_otel as ci
from cirron_otel.batch import SnapshotRecord, decode
from cirron_otel.weights.reductions import fused_way
from cirron_otel.weights.statistics import Skipped, TensorStats, tensor_stats

if TYPE_CHECKING:
    from place import Place


def _agree(mine: object, theirs: object) -> None:
    assert isinstance(mine, TensorStats), mine
    assert isinstance(theirs, TensorStats), theirs
    assert mine.nonfinite_count == theirs.nonfinite_count
    if mine.nonfinite_count == mine.numel and mine.numel:
        return
    ours, other = mine.finite or mine, theirs.finite or theirs
    assert ours.histogram == other.histogram, (mine, theirs)
    assert (ours.min, ours.max) == (other.min, other.max)
    for field in ("mean", "std", "norm"):
        mine_is, theirs_is = getattr(ours, field), getattr(other, field)
        assert abs(mine_is - theirs_is) <= 1e-9 * (abs(theirs_is) + ours.norm), field


def statistics_are_made_on_the_device(place: Place, _: str) -> None:
    """The fused kernels give the numbers of the host, for every dtype, in little memory."""
    random = torch.Generator().manual_seed(0)
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int8]
    if place.is_gpu:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            way = fused_way(torch.device("cuda", 0), dtype)
            assert way is not None, f"no fused kernel for {dtype}"
    host = [
        (torch.randn(size, generator=random) * 5 + 1).to(dtype)
        for dtype in dtypes
        for size in (1, 511, place.size(70_000, 3_000), place.size(3_000_001, 3_001))
    ]
    for one in host:
        if one.is_floating_point() and one.numel() > 100:
            one[7], one[99], one[-1] = torch.nan, torch.inf, -torch.inf
    host += [torch.randn(64, 3, 7, 7).contiguous(memory_format=torch.channels_last)]
    host += [torch.randn(40, 50)[:, 3:], torch.randn(40, 50).t(), torch.randn(7)[1:]]
    host += [torch.empty(0), torch.full((300,), torch.nan), torch.full((300,), 1e-42)]
    device = [one.to(place.device) for one in host]
    large = torch.randn(place.size(64 << 20, 1 << 10), device=place.device)
    tensor_stats([*device, large])
    if place.is_gpu:
        place.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    found = tensor_stats([*device, large])
    if place.is_gpu:
        used = torch.cuda.max_memory_allocated() - before
        assert used < 13 << 20, f"{used:,} bytes beside a tensor of {large.nbytes:,}"
    for mine, theirs in zip(found, tensor_stats(host), strict=False):
        _agree(mine, theirs)
    assert tensor_stats([large]) == tensor_stats([large]), "not the same bits twice"


def statistics_see_what_the_program_has_queued(place: Place, _: str) -> None:
    """A snapshot waits for the writes before it, and later writes do not reach it."""
    x = torch.zeros(place.size(32 << 20, 100), device=place.device)
    for _round in range(place.size(20, 2)):
        x.fill_(1.0)
        x.mul_(2.0)
        (found,) = tensor_stats([x])
        x.fill_(5.0)
        assert isinstance(found, TensorStats)
        assert (found.min, found.max, found.mean) == (2.0, 2.0, 2.0), found


def statistics_see_what_another_stream_of_the_program_does(place: Place, _: str) -> None:
    """The stream that is current is the one whose writes are waited for; and no other is."""
    x = torch.zeros(place.size(1 << 20, 100), device=place.device)
    tensor_stats([x])
    place.synchronize()
    if place.is_gpu:
        busy, done = torch.cuda.Stream(), torch.cuda.Event()
        with torch.cuda.stream(busy):
            torch.cuda._sleep(1_000_000_000)  # half a second of a stream we have nothing to do with
            done.record()
    with place.stream():
        x.fill_(3.0)
        (found,) = tensor_stats([x])
    assert not place.is_gpu or not done.query(), "the whole device was waited for"
    assert isinstance(found, TensorStats)
    assert found.mean == 3.0, found


def statistics_use_no_wait_that_torch_forbids(place: Place, _: str) -> None:
    """They are made under ``set_sync_debug_mode("error")``: it is an event that is waited for."""
    some = [torch.ones(100, dtype=one, device=place.device)
            for one in (torch.float32, torch.bfloat16, torch.int64)]  # fmt: skip
    tensor_stats(some)
    with place.no_waits():
        found = tensor_stats(some)
    assert [one.mean for one in found if isinstance(one, TensorStats)] == [1.0, 1.0, 1.0], found


def statistics_of_a_model_in_several_places(place: Place, _: str) -> None:
    """Parts on each device and on the host, with another device current, are described alike."""
    devices = [torch.device("cpu")]
    if place.is_gpu:
        devices += [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    host = [torch.randn(1000, dtype=torch.float32) for _ in range(2 * len(devices))]
    parts = [one.to(devices[number % len(devices)]) for number, one in enumerate(host)]
    with torch.cuda.device(torch.cuda.device_count() - 1):
        current = torch.cuda.current_device() if place.is_gpu else None
        found = tensor_stats(parts)
        assert current is None or torch.cuda.current_device() == current
    for mine, theirs in zip(found, tensor_stats(host), strict=True):
        _agree(mine, theirs)


def no_statistics_while_a_graph_is_captured(place: Place, _: str) -> None:
    """They have a named reason then, and the graph replays."""
    x = torch.ones(1000, device=place.device)
    with place.graph() as graph:
        y = x * 2
        found = tensor_stats([x, y])
    if graph is not None:
        graph.replay()
    place.synchronize()
    reasons = [one.reason for one in found if isinstance(one, Skipped)]
    assert reasons == ["capture", "capture"] * place.is_gpu, found
    assert y.sum().item() == 2000


def snapshots_of_a_training_are_right(place: Place, directory: str) -> None:
    """Rows of an epoch's end and of the last step's gradients are those of copies on the host."""
    model = nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 1)).to(place.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(24, 8)), batch_size=8)
    ci.profile(path=directory)
    ci.watch(model)
    for _ in ci.epochs(range(1)):
        for (x,) in loader:
            model(x.to(place.device)).square().mean().backward()
            kept = {f"{key}.grad": one.grad.cpu() for key, one in model.named_parameters()}  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
    kept |= {key: one.detach().cpu() for key, one in model.named_parameters()}
    assert ci.shutdown()
    rows: list[SnapshotRecord] = [
        row
        for file in sorted(Path(directory).glob("spool/*.json"))
        for row in decode(file.read_bytes()).snapshots
    ]
    assert {row.tensor_name for row in rows} == set(kept)
    for row in rows:
        (expected,) = tensor_stats([kept[row.tensor_name]])
        assert isinstance(expected, TensorStats)
        assert row.stats is not None
        assert expected.histogram is not None
        assert row.stats["histogram"]["counts"] == list(expected.histogram.counts), row
        assert abs(row.stats["norm"] - expected.norm) <= 1e-9 * expected.norm, row


CHECKS = (
    statistics_are_made_on_the_device,
    statistics_see_what_the_program_has_queued,
    statistics_see_what_another_stream_of_the_program_does,
    statistics_use_no_wait_that_torch_forbids,
    statistics_of_a_model_in_several_places,
    no_statistics_while_a_graph_is_captured,
    snapshots_of_a_training_are_right,
)
