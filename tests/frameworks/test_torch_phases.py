# mypy: disable-error-code="no-untyped-call"
"""Forward, backward and optimizer steps under the torch hook; and torch as it was afterwards."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

import cirron_otel as ci
from frameworks.torch_programs import Program, finished_tree
from helpers import read_spool


class Failing(nn.Module):
    """A module whose forward raises, inside another's."""

    def forward(self, _x: torch.Tensor) -> torch.Tensor:
        """Raise, always."""
        raise ArithmeticError("no such forward")


def test_only_the_outermost_call_is_a_forward() -> None:
    """Nested modules add nothing; the mode is that of the outermost one."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Dropout())
    ci.profile()
    with ci.scope("train"):
        model(torch.ones(1, 2))
    model.eval()
    with ci.scope("eval"):
        model(torch.ones(1, 2))
    model.forward(torch.ones(1, 2))  # calls its children, each on its own
    assert finished_tree(attrs=["mode"]).splitlines() == [
        "cirron.session",
        "  train",
        '    forward mode="train"',
        "  eval",
        '    forward mode="eval"',
        '  forward mode="eval"',
        '  forward mode="eval"',
    ]


def test_backward_looks_like_torchs_own() -> None:
    """Name, text, signature, pickling and binding are those of what stood there before."""
    functions = [(torch.Tensor, torch.Tensor.backward), (torch.autograd, torch.autograd.backward)]
    seen = [
        (f.__name__, f.__qualname__, f.__module__, f.__doc__, inspect.signature(f))
        for _, f in functions
    ]
    ci.profile(frameworks=["torch"])
    for (owner, original), (name, qualname, module, doc, signature) in zip(
        functions, seen, strict=True
    ):
        now = owner.backward  # type: ignore[attr-defined]
        assert now is not original
        assert (now.__name__, now.__qualname__, now.__module__) == (name, qualname, module)
        assert (now.__doc__, inspect.signature(now)) == (doc, signature)
        assert inspect.isroutine(now)
        assert inspect.unwrap(now) is original
        assert pickle.loads(pickle.dumps(now)) is now  # noqa: S301 - our own
        assert copy.deepcopy(now) is now
    weight = torch.ones(2, requires_grad=True)
    bound = (weight * 2).sum().backward
    assert inspect.ismethod(bound)
    bound(retain_graph=True)
    bound(inputs=[weight])
    assert weight.grad is not None
    assert weight.grad.tolist() == [4.0, 4.0]
    ci.shutdown()
    assert all(owner.backward is original for owner, original in functions)  # type: ignore[attr-defined]
    assert [span.name for span in read_spool().spans].count("backward") == 2


def test_a_model_with_a_compiled_call_is_called_that_way() -> None:
    """``Module.compile()`` and methods of a module's own are found as torch finds them."""

    class Own(nn.Linear):
        def _call_impl(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> str:
            return f"own {len(args)} {sorted(kwargs)}"

    model = nn.Linear(2, 2)
    ci.profile(frameworks=["torch"])
    assert Own(2, 2)(torch.ones(1), input=torch.ones(1)) == "own 1 ['input']"
    model._compiled_call_impl = lambda *args: f"compiled {len(args)}"  # type: ignore[assignment]
    assert model(torch.ones(1)) == "compiled 1"
    with pytest.raises(TypeError):
        nn.Linear.__call__()
    ci.shutdown()
    assert [span.name for span in read_spool().spans].count("forward") == 2


def test_an_exception_in_forward_flies_on_and_leaves_nothing_open() -> None:
    """The exception is the program's own, is recorded, and later forwards are seen (C-W10)."""
    model = nn.Sequential(nn.Linear(2, 2), Failing())
    ci.profile()
    with pytest.raises(ArithmeticError) as caught:
        model(torch.ones(1, 2))
    assert caught.value.args == ("no such forward",)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    nn.Linear(2, 2)(torch.ones(1, 2))
    tree = finished_tree(attrs=["error"])
    assert tree == 'cirron.session\n  forward error="ArithmeticError: no such forward"\n  forward'


def test_backward_is_one_scope_by_either_name() -> None:
    """``Tensor.backward`` and ``torch.autograd.backward`` give one scope each, failures too."""
    weight = torch.ones(2, requires_grad=True)
    ci.profile()
    (weight * 2).sum().backward()
    torch.autograd.backward((weight * 2).sum())
    with pytest.raises(RuntimeError, match="implicitly created only for scalar"):
        (weight * 2).backward()
    (weight * 2).sum().backward()
    assert finished_tree() == "cirron.session" + "\n  backward" * 4
    failed = [span for span in read_spool().named("backward") if "error" in span.attrs]
    assert len(failed) == 1


def test_what_autograd_runs_itself_is_no_forward() -> None:
    """Recomputed forwards and nested backwards inside autograd make no scopes of their own."""
    model = nn.Linear(2, 2)

    def part(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(x)
        return result

    ci.profile()
    x = torch.ones(1, 2, requires_grad=True)
    for reentrant in (False, True):
        kept = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=reentrant)
        kept.sum().backward()
    assert finished_tree() == "cirron.session" + "\n  forward\n  backward" * 2


def test_hooks_on_other_threads_find_their_way() -> None:
    """A tensor hook that marks from autograd, wherever that runs it, breaks nothing (report 28)."""
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda grad: ci.mark("grad", grad.sum()))
    ci.profile()
    (weight * 2).sum().backward()
    assert finished_tree(marks=True) == "cirron.session\n  backward {grad}"


@pytest.mark.parametrize("scheduled", ["never", "before", "after"])
def test_every_optimizer_is_seen(scheduled: str) -> None:
    """Each step of each optimizer is one scope, whenever it and its scheduler were made."""
    weights = [torch.ones(2, requires_grad=True) for _ in range(3)]

    class Mine(torch.optim.SGD):
        """An optimizer of the user's own that calls its parent's step."""

        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    early = torch.optim.SGD([weights[0]], lr=0.1)
    if scheduled == "before":
        torch.optim.lr_scheduler.StepLR(early, 1)
    ci.profile()
    late = [torch.optim.AdamW([weights[1]], lr=0.1), Mine([weights[2]], lr=0.1)]
    if scheduled == "after":
        for optimizer in (early, *late):
            torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for weight in weights:
        weight.grad = torch.ones(2)
    for optimizer in (early, *late):
        optimizer.step()
    assert finished_tree(attrs=["optimizer"]).splitlines() == [
        "cirron.session",
        '  optimizer_step optimizer="SGD"',
        '  optimizer_step optimizer="AdamW"',
        '  optimizer_step optimizer="Mine"',
    ]


def test_a_scheduler_outlives_two_recordings() -> None:
    """A step that a scheduler has kept from an earlier recording still gives one scope."""
    weight = torch.ones(2, requires_grad=True)
    ci.profile(path="first")
    optimizer = torch.optim.SGD([weight], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    ci.shutdown()
    weight.grad = torch.ones(2)
    optimizer.step()
    ci.profile()
    optimizer.step()
    assert finished_tree() == "cirron.session\n  optimizer_step"


@pytest.mark.parametrize("scheduled", [False, True])
def test_an_exception_in_an_optimizer_step(scheduled: bool) -> None:  # noqa: FBT001
    """A step that raises is over; the next one stands beside it."""
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    if scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def closure() -> float:
        raise InterruptedError("not now")

    ci.profile()
    for _ in range(2):
        with pytest.raises(InterruptedError, match="not now"):
            optimizer.step(closure)
    optimizer.step()
    assert finished_tree() == "cirron.session" + "\n  optimizer_step" * 3
    errors = [span.attrs.get("error") for span in read_spool().named("optimizer_step")]
    # torch tells its own hooks nothing of the exception; they are all there is before us.
    told = None if scheduled else "InterruptedError: not now"
    assert errors == [told, told, None]


def test_closures_of_lbfgs_lie_in_its_step() -> None:
    """Forward and backward of a closure are children of the optimizer step that calls it."""
    program = Program(batches=1)
    optimizer = torch.optim.LBFGS(program.model.parameters(), max_iter=2)
    batch = next(iter(program.loader))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = program.loss(batch)
        loss.backward()
        return loss

    ci.profile()
    optimizer.step(closure)
    lines = finished_tree().splitlines()
    assert lines[:4] == ["cirron.session", "  optimizer_step", "    forward", "    backward"]
    assert lines.count("  optimizer_step") == 1
    assert set(lines[2:]) == {"    forward", "    backward"}


def test_a_step_that_the_scaler_skips_is_none() -> None:
    """GradScaler leaves a step out when gradients are not finite: no scope then."""
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    ci.profile()
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        with ci.scope("update"):
            scaler.step(optimizer)
            scaler.update()
    assert finished_tree() == "\n".join(
        [
            "cirron.session",
            *("  backward", "  update", "    optimizer_step"),
            *("  backward", "  update"),
            *("  backward", "  update", "    optimizer_step"),
        ]
    )


def test_two_models_in_two_threads() -> None:
    """Threads do not see each other's forwards, steps and epochs."""
    programs = [Program(batches=20), Program(batches=20)]
    ci.profile()

    def train(program: Program, name: str) -> None:
        with ci.scope(name):
            for batch in program.loader:
                program.train_step(batch)

    threads = [
        threading.Thread(target=train, args=(program, f"thread{number}"))
        for number, program in enumerate(programs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ci.shutdown()
    rows = read_spool()
    assert ci.health()["losses"] == {}
    for number in range(2):
        (epoch,) = rows.children(rows.one(f"thread{number}"))
        assert epoch.name == "epoch"
        assert [step.index for step in rows.children(epoch)] == list(range(20))
        for step in rows.children(epoch):
            assert [child.name for child in rows.children(step)] == [
                "data_load",
                "forward",
                "backward",
                "optimizer_step",
            ]
    assert sorted(str(step.iteration) for step in rows.named("step")) == sorted(
        str(number) for number in range(40)
    )


def test_training_gives_the_same_numbers() -> None:
    """Weights after training are the same bit for bit, and the random streams are untouched."""

    def train(*, recorded: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(3)
        program = Program(batches=4, shuffle=True)
        if recorded:
            ci.profile()
        for _ in range(2):
            for batch in program.loader:
                program.train_step(batch)
        if recorded:
            ci.shutdown()
        return [p.detach().clone() for p in program.model.parameters()], torch.rand(4)

    (plain, plain_random), (seen, seen_random) = train(recorded=False), train(recorded=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    assert torch.equal(plain_random, seen_random)


def _patched() -> list[Any]:
    return [
        vars(nn.Module)["__call__"],
        vars(torch.Tensor)["backward"],
        torch.autograd.backward,
        vars(torch.optim.SGD)["step"],
        vars(torch.optim.Optimizer)["_patch_step_function"],
        vars(DataLoader)["__iter__"],
        vars(_BaseDataLoaderIter)["__next__"],
        dict(_global_optimizer_pre_hooks),
        dict(_global_optimizer_post_hooks),
    ]


def test_torch_is_as_it_was_after_shutdown() -> None:
    """Every function that was replaced is the very object it was before."""
    torch.optim.SGD([torch.ones(1)], lr=0.1)
    before = _patched()
    ci.profile()
    replaced = _patched()
    assert all(a is not b for a, b in zip(before, replaced, strict=True))
    assert before[-2:] != replaced[-2:]
    ci.shutdown()
    after = _patched()
    assert all(a is b for a, b in zip(before[:-2], after[:-2], strict=True))
    assert before[-2:] == after[-2:]


def test_a_patch_on_top_of_ours_stays_and_ours_sleeps() -> None:
    """Who patched after us keeps that patch; what it wraps records nothing any more."""
    original = nn.Module.__call__
    calls: list[object] = []
    ci.profile()
    ours = nn.Module.__call__

    def theirs(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return ours(self, *args, **kwargs)

    nn.Module.__call__ = theirs  # type: ignore[method-assign]
    try:
        nn.Linear(1, 1)(torch.ones(1))
        ci.shutdown()
        nn.Linear(1, 1)(torch.ones(1))
        assert nn.Module.__call__ is theirs
        assert len(calls) == 2
        assert len(read_spool().named("forward")) == 1
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


def test_watched_models_can_be_saved_and_copied() -> None:
    """Nothing of ours sticks to a model: save, pickle, deepcopy, script and trace work."""
    ci.profile()
    model = ci.watch(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    x = torch.ones(1, 2)
    expected = model(x)
    attributes = set(vars(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert torch.equal(other(x), expected)
        assert set(vars(other)) == attributes
    assert ci.health()["swallowed_errors"] == {}
    ci.shutdown()
    assert len(read_spool().named("forward")) == 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_scripted_and_traced_models_work() -> None:
    """TorchScript compiles a model under the hook, and its calls are forwards like any other."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    x = torch.ones(1, 2)
    expected = model(x)
    ci.profile()
    made = [torch.jit.script(model), torch.jit.trace(model, x)]
    before = ci.health()["losses"]
    for one in made:
        with ci.scope("call"):
            assert torch.equal(one(x), expected)
    assert before == {}
    ci.shutdown()
    rows = read_spool()
    for call in rows.named("call"):
        assert [child.name for child in rows.children(call)] == ["forward"]


def test_the_session_says_what_it_runs_on() -> None:
    """The session names the device and whether autocast was on (no GPU: the CPU)."""
    ci.profile()
    ci.shutdown()
    attrs = read_spool().one("cirron.session").attrs
    assert "torch" in attrs["framework"].split(",")
    assert attrs["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert attrs["mixed_precision"] is False
