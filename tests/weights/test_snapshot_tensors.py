# mypy: disable-error-code="no-untyped-call"
"""Tensors of every kind in a snapshot: right numbers, or a row with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import cirron_otel as ci
from cirron_otel import semconv
from weights.snapshots_by_hand import files, finished, quantised


def test_tied_and_odd_tensors_all_have_a_row() -> None:
    """A tied weight, a complex and a meta parameter: each a row, with numbers or the reason."""
    model = nn.Module()
    model.first = nn.Linear(3, 3, bias=False)
    model.second = nn.Linear(3, 3, bias=False)
    model.second.weight = model.first.weight
    model.wave = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    model.ghost = nn.Parameter(torch.empty(2, device="meta"))
    model.none = nn.Parameter(torch.empty(0, 4))
    ci.profile(frameworks=[])
    ci.snapshot(model)
    assert ci.health()["snapshots"]["skipped"] == {"complex": 1, "meta": 1}
    rows = {row.tensor_name: row for row in finished().snapshots}
    assert list(rows) == ["wave", "ghost", "none", "first.weight", "second.weight"]
    assert rows["second.weight"].attrs == {semconv.TIED_TO: "first.weight"}
    assert rows["second.weight"].stats == rows["first.weight"].stats is not None
    assert (rows["wave"].stats, rows["wave"].attrs) == (None, {semconv.SKIPPED: "complex"})
    assert rows["ghost"].attrs == {semconv.SKIPPED: "meta"}
    assert rows["none"].stats is not None


def test_sparse_gradients_do_not_disturb_the_others() -> None:
    """A sparse gradient is named with its reason; the dense ones have their numbers."""
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    model(torch.tensor([1, 2])).sum().backward()
    ci.profile(frameworks=[])
    ci.snapshot(model)
    rows = {row.tensor_name: row for row in finished().snapshots}
    assert rows["0.weight.grad"].attrs == {semconv.SKIPPED: "sparse"}
    assert rows["1.weight.grad"].stats is not None


def test_bfloat16_is_counted_right() -> None:
    """The counts of 100,000 bfloat16 weights are all there, the numbers right (C-W4)."""
    torch.manual_seed(0)
    weight = torch.randn(100_000).bfloat16()
    ci.profile(frameworks=[])
    ci.snapshot({"w": weight})
    row = finished().snapshots[0]
    assert (row.dtype, row.shape) == ("bfloat16", [100_000])
    assert row.stats is not None
    assert sum(row.stats["histogram"]["counts"]) == 100_000
    exact = weight.double()
    assert row.stats["std"] == pytest.approx(exact.std(correction=0).item(), rel=1e-9)
    assert row.stats["norm"] == pytest.approx(exact.norm().item(), rel=1e-9)


def test_values_that_are_not_finite() -> None:
    """NaN and infinities are counted, and the rest is described."""
    ci.profile(frameworks=[])
    ci.snapshot({"w": torch.tensor([1.0, float("nan"), 3.0, float("inf")])})
    stats = finished().snapshots[0].stats
    assert stats is not None
    assert (stats["mean"], stats["nonfinite"]["mean"]) == (None, "nan")
    assert (stats["nonfinite_count"], stats["finite"]["count"]) == (2, 2)
    assert stats["finite"]["mean"] == 2.0


class Raises(torch.Tensor):
    """A tensor of a program's own that lets nobody do anything."""

    @classmethod
    def __torch_function__(cls, *_args: Any, **_kwargs: Any) -> Any:
        """Raise."""
        raise RuntimeError("not allowed")

    @property
    def shape(self) -> Any:  # type: ignore[override]
        """Raise."""
        raise RuntimeError("not allowed")

    dtype = grad = is_leaf = layout = device = data = shape  # type: ignore[assignment]


class Holds(torch.Tensor):
    """A wrapper whose values lie in another tensor, as quantised weights are made."""

    inner: torch.Tensor
    #: Whether its values may be copied.
    copies = True

    @classmethod
    def of(cls, inner: torch.Tensor) -> Holds:
        """Wrap a tensor."""
        made: Holds = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do as the inner tensor does."""
        if "copy" in str(func) and not all(one.copies for one in args if isinstance(one, Holds)):
            raise RuntimeError("no copies")
        plain = [one.inner if isinstance(one, Holds) else one for one in args]
        return func(*plain, **(kwargs or {}))


def test_a_tensor_that_raises_in_everything_is_alone() -> None:
    """It has a row with the reason, every other tensor its numbers and its place in the file."""
    secret = Holds.of(torch.ones(3))
    secret.copies = False
    model = {
        "fine": torch.ones(2),
        "raises": torch.ones(2).as_subclass(Raises),
        "holds": Holds.of(torch.arange(4.0)),
        "secret": secret,
        "big": torch.ones(100, 3),
    }
    ci.profile(snapshots="full", frameworks=[])
    ci.snapshot(model)
    health = ci.health()["snapshots"]
    rows = {row.tensor_name: row for row in finished().snapshots}
    assert list(rows) == list(model)
    assert rows["raises"].attrs == {semconv.SKIPPED: "error"}
    assert rows["holds"].stats is not None
    assert rows["holds"].stats["max"] == 3.0
    (path,) = files()
    read = load_file(path)
    assert set(read) == {"fine", "holds", "big"}
    assert read["holds"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert [name for name, row in rows.items() if row.mode == "full"] == ["fine", "holds", "big"]
    assert health["skipped"]["not_in_file"] == 2
    assert health["files"] == 1


def test_a_model_may_change_between_snapshots() -> None:
    """Layers that come and go, another dtype, a move to meta, memory that is freed: as it is."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    ci.profile(snapshots="full", frameworks=[])
    ci.watch(model)
    ci.snapshot(name="first")
    model.append(nn.Linear(2, 1, bias=False).bfloat16())
    model[0].requires_grad_(requires_grad=False)
    ci.snapshot(name="more")
    model[0].to_empty(device="meta")
    model[1].weight.untyped_storage().resize_(0)
    ci.snapshot(name="gone")
    del model[0], model[0]
    assert ci.snapshot(name="empty") is None
    ci.snapshot({"q": quantised(), "wide": torch.ones(1).expand(3, 4), "t": torch.ones(2, 3).T})
    rows = finished()
    found = [[(row.tensor_name, row.dtype, row.attrs.get(semconv.SKIPPED), row.mode)
              for row in rows.snapshots if row.span_id == span.id]
             for span in rows.named(semconv.SNAPSHOT)]  # fmt: skip
    assert found == [
        [("0.weight", "float32", None, "full")],
        [("0.weight", "float32", None, "full"), ("1.weight", "bfloat16", None, "full")],
        [("0.weight", "float32", "meta", "stats"), ("1.weight", "bfloat16", "no_storage", "stats")],
        [("q", "qint8", "quantized", "stats"), ("wide", "float32", None, "full"),
         ("t", "float32", None, "full")],
    ]  # fmt: skip


class Counts(TorchDispatchMode):
    """Counts what torch is asked to do."""

    calls = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and do it."""
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_modes_of_the_program_do_not_matter() -> None:
    """Under no_grad, inference_mode, autocast, a default device or dtype, or a mode: the same."""
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Linear(3, 2)).to(memory_format=torch.channels_last)
    model.register_parameter("cut", nn.Parameter(torch.arange(10.0)[::3]))
    ci.profile(snapshots="full", frameworks=[])
    ci.snapshot(model)
    counts = Counts()
    for mode in (
        torch.no_grad(), torch.inference_mode(), torch.autocast("cpu"), torch.device("meta"), counts
    ):  # fmt: skip
        with mode:
            ci.snapshot(model)
    torch.set_default_dtype(torch.float16)
    try:
        ci.snapshot(model)
    finally:
        torch.set_default_dtype(torch.float32)
    rows = finished()
    found = [[(row.tensor_name, row.stats, row.mode) for row in rows.snapshots
              if row.span_id == span.id] for span in rows.named(semconv.SNAPSHOT)]  # fmt: skip
    assert found == [found[0]] * 7
    assert all(stats is not None for _, stats, _ in found[0])
    assert counts.calls == 0
