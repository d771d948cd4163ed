# mypy: disable-error-code="no-untyped-call"
"""Of what snapshots are taken: any model and any tensor in it, each with a row of its own."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import cirron_otel as ci
from weights.snapshots_by_hand import files, finished, taken


def test_names_of_several_models() -> None:
    """With several models, or a name, every tensor says whose it is; buffers on demand."""
    ci.profile(frameworks=[])
    ci.watch(nn.Linear(1, 1))  # gone at once: it is not counted
    generator, critic = nn.Linear(1, 1), nn.BatchNorm1d(2)
    ci.watch(generator, name="generator")
    ci.watch(critic, name="critic", buffers=True)
    assert ci.snapshot() is not None
    ci.watch(None)
    ci.watch(generator, name="alone")
    ci.snapshot(generator)
    ci.snapshot(critic)
    assert [names for _, _, names in taken(finished())] == [
        ["generator.weight", "generator.bias", "critic.weight", "critic.bias",
         "critic.running_mean", "critic.running_var", "critic.num_batches_tracked"],
        ["alone.weight", "alone.bias"],
        ["weight", "bias"],
    ]  # fmt: skip


def test_a_watched_model_is_an_ordinary_one() -> None:
    """Copies, pickles and state dicts of a watched model know nothing of us; it can be freed."""
    model = nn.Sequential(nn.Linear(2, 2))
    before = set(vars(model)), list(model.state_dict())
    ci.profile()
    ci.watch(model)
    for _ in ci.epochs(range(1)):
        pass
    assert (set(vars(model)), list(model.state_dict())) == before
    assert copy.deepcopy(model).state_dict().keys() == model.state_dict().keys()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    assert averaged.module is not model
    assert b"cirron" not in pickle.dumps(model)
    reference = weakref.ref(model)
    del model, averaged
    gc.collect()
    assert reference() is None
    assert len(finished().snapshots) == 2


def test_two_ranks_of_replicas_write_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that is the same on every rank the first rank alone writes files."""

    class DistributedDataParallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    monkeypatch.setenv("RANK", "1")
    ci.profile(snapshots="full", frameworks=[])
    ci.snapshot(DistributedDataParallel())
    ci.snapshot(nn.Linear(1, 1))
    assert [row.mode for row in finished().snapshots] == ["stats"] * 2 + ["full"] * 2


# -- odd names -----------------------------------------------------------------------------------


def test_two_models_of_one_name_stay_apart() -> None:
    """Names that are given twice, or that come out the same, are numbered; no row is another's."""
    one, two = nn.Linear(1, 1), nn.Linear(2, 1)
    ci.profile(snapshots="full", frameworks=[])
    ci.watch(one, name="net")
    ci.watch(two, name="net")
    ci.snapshot()
    ci.snapshot({"a": torch.ones(1), 1: torch.ones(2), "1": torch.ones(3)})
    rows = finished()
    shapes = {row.tensor_name: row.shape for row in rows.snapshots}
    assert shapes == {
        "net.weight": [1, 1], "net.bias": [1], "net_2.weight": [1, 2], "net_2.bias": [1],
        "a": [1], "1": [2], "1_2": [3],
    }  # fmt: skip
    assert {row.mode for row in rows.snapshots} == {"full"}


ODD_NAMES = [
    "a.b/c", "caf\u00e9 \U0001f600", "\ud800", "nul\0", "line\nbreak", "x" * 100_000, "",
    "__metadata__", "../../etc/passwd", "span",
]  # fmt: skip


def test_any_name_has_its_row_and_its_tensor() -> None:
    """Dots, slashes, Unicode, half a surrogate, any length: the row's name is the file's key."""
    ci.profile(snapshots="full", frameworks=[])
    ci.snapshot({name: torch.full((2,), float(i)) for i, name in enumerate(ODD_NAMES)})
    rows = finished().snapshots
    assert [row.stats["mean"] for row in rows if row.stats] == list(map(float, range(10)))
    assert len({row.tensor_name for row in rows}) == len(ODD_NAMES)
    (path,) = [path for path in files() if path.suffix == ".safetensors"]
    read = load_file(path)
    for row in rows:
        assert row.stats is not None
        if row.tensor_name == "__metadata__":  # the format's own word
            assert (row.blob_uri, row.mode) == (None, "stats")
        else:
            assert read[row.tensor_name].tolist() == [row.stats["mean"]] * 2


# -- odd models -----------------------------------------------------------------------------------


def test_a_model_whose_own_methods_raise_is_alone() -> None:
    """One that lists its parameters in its own way is read; one that cannot is told of once."""

    class Own(nn.Linear):
        def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:  # type: ignore[override]  # noqa: FBT001, FBT002
            return ((f"own/{n}", p) for n, p in super().named_parameters(prefix, recurse))

    class Broken(nn.Linear):
        def named_parameters(self, *_args: Any, **_kwargs: Any) -> Any:
            raise RuntimeError("not now")

    own, broken = Own(1, 1), Broken(1, 1)
    ci.profile(frameworks=[])
    ci.watch(own, broken)
    ci.snapshot()
    assert ci.health()["snapshots"]["skipped"] == {"model_error": 1}
    assert [row.tensor_name for row in finished().snapshots] == [
        "Own.own/weight", "Own.own/bias"
    ]  # fmt: skip


@pytest.mark.slow
def test_models_in_the_wrappers_of_torch() -> None:
    """Compiled, averaged, parametrised, replicated: names are those of ``named_parameters``."""
    model = nn.Linear(2, 2, bias=False)
    nn.utils.parametrizations.weight_norm(model)
    compiled = torch.compile(model, backend="eager")
    averaged = torch.optim.swa_utils.AveragedModel(model)
    ci.profile(snapshots="full", frameworks=[])
    for one in (model, compiled, averaged, nn.DataParallel(model)):
        ci.snapshot(one)
    rows = finished()
    names = [names for _, _, names in taken(rows)]
    plain = ["parametrizations.weight.original0", "parametrizations.weight.original1"]
    wraps = ("", "_orig_mod.", "module.", "module.")
    assert names == [[wrap + name for name in plain] for wrap in wraps]


def test_of_a_module_inside_replicas_rank_zero_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the module itself was watched, before it was wrapped."""

    class DistributedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x)  # type: ignore[no-any-return]

    monkeypatch.setenv("RANK", "1")
    model = nn.Linear(1, 1, bias=False)
    ci.profile(snapshots="full")
    ci.watch(model)
    ci.snapshot(name="not yet wrapped")
    DistributedDataParallel(model)(torch.ones(1)).backward()
    wrapped = DistributedDataParallel(model)
    wrapped(torch.ones(1)).backward()
    ci.snapshot(name="wrapped")
    ci.snapshot(model, mode="full")
    ci.snapshot(nn.Linear(1, 1, bias=False))
    modes = [row.mode for row in finished().snapshots if not row.tensor_name.endswith(".grad")]
    assert modes == ["full", "stats", "stats", "full"]
