"""torch.compile and the hook: no graph breaks, no recompilations, one forward per call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import cirron_otel as ci
from frameworks.torch_programs import finished_tree
from helpers import ProgramRun, RunProgram, read_spool, tree_text

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    # The compiler looks at every attribute of a tensor, also those that warn.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

X = torch.ones(2, 3)


class Counting:
    """A compiler backend that runs the graph as it is and counts the graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        """Compile one graph, as torch calls a backend."""
        self.graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def _no_code_of_other_tests() -> None:
    torch.compiler.reset()


class Net(nn.Module):
    """A model with modules in modules; of a class of its own, for torch skips its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.last = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call both parts."""
        result: torch.Tensor = self.last(self.inner(x))
        return result


def _model() -> Net:
    return Net()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["function", "method"])
def test_a_compiled_model_is_one_graph_and_one_forward(when: str, how: str) -> None:
    """Compiled before or after ``profile()``, the model stays whole (C-W10)."""
    backend, model = Counting(), _model()
    if when == "after":
        ci.profile()
    called: Any = model
    if how == "function":
        called = torch.compile(model, fullgraph=True, backend=backend)
    else:
        model.compile(fullgraph=True, backend=backend)
    if when == "before":
        called(X)
        ci.profile()
    for _ in range(4):
        called(X).sum().backward()
    assert backend.graphs == 1
    tree = finished_tree(without=["compile"])
    assert tree == "cirron.session" + "\n  forward\n  backward" * 4


def test_a_compiled_function_is_not_compiled_again_inside_a_forward() -> None:
    """The same compiled code serves inside and outside of a module call: no guard of ours."""
    backend, part = Counting(), _model()
    compiled = torch.compile(lambda x: part(x).sum(), fullgraph=True, backend=backend)

    class Whole(nn.Module):
        """Calls the compiled function."""

        def forward(self, x: torch.Tensor) -> Any:
            return compiled(x)

    ci.profile()
    compiled(X)
    Whole()(X)
    compiled(X)
    assert backend.graphs == 1
    assert finished_tree(without=["compile"]) == "cirron.session\n  forward"


def test_scopes_and_marks_vanish_in_compiled_code() -> None:
    """Our helpers inside a compiled region neither break the graph nor record."""
    backend = Counting()

    class Scoped(nn.Module):
        """Uses scopes and marks in forward, as context manager and decorator."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with ci.scope("inside", width=3):
                x = self.linear(x)
                ci.mark("mean", x.mean(), layer="linear")
            for _ in ci.batches(range(2)):
                x = _doubled(x)
            return x

    model = Scoped()
    ci.profile()
    expected = model(X)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert torch.equal(compiled(X), expected)
    assert torch.equal(compiled(X), expected)
    assert backend.graphs == 1
    ci.shutdown()
    first, *compiled_ones = read_spool().named("forward")
    assert len(compiled_ones) == 2
    assert [child.name for child in read_spool().children(first)] == ["inside", "epoch"]
    inside = [read_spool().children(span) for span in compiled_ones]
    assert [[child.name for child in children] for children in inside] == [["compile"], []]


@ci.scope("doubled")  # type: ignore[untyped-decorator]
def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_compiled_training_step() -> None:
    """An optimizer step in compiled code works under the hook, with the same numbers."""

    def train(*, compiled: bool) -> torch.Tensor:
        torch.manual_seed(1)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def update() -> None:
            optimizer.step()

        call = torch.compile(update, backend="eager") if compiled else update
        for _ in range(3):
            optimizer.zero_grad()
            model(X).sum().backward()
            call()
        return model.weight.detach()

    ci.profile()
    assert torch.equal(train(compiled=True), train(compiled=False))
    tree = finished_tree()
    assert tree.count("backward") == 6
    assert 3 <= tree.count("optimizer_step") <= 6


def test_a_compiled_step_is_as_many_graphs_as_without_the_hook() -> None:
    """Nothing that stands around an optimizer's step breaks a graph that torch would not break."""

    def graphs(*, hooked: bool) -> int:
        torch.compiler.reset()
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backend = Counting()
        if hooked:
            ci.profile(frameworks=["torch"])
        call = torch.compile(optimizer.step, backend=backend)
        for _ in range(2):
            model(X).sum().backward()
            call()
        assert not hooked or ci.health()["swallowed_errors"] == {}
        ci.shutdown()
        return backend.graphs

    assert graphs(hooked=True) == graphs(hooked=False) > 0


def test_compiling_works_after_shutdown() -> None:
    """Torch compiles as before once the hook is gone, also if it was there when it loaded."""
    ci.profile()
    torch.compile(_model(), fullgraph=True, backend="eager")(X)
    ci.shutdown()
    backend = Counting()
    compiled = torch.compile(_model(), fullgraph=True, backend=backend)
    compiled(X)
    compiled(X)
    assert backend.graphs == 1
    assert tree_text(read_spool()) == "cirron.session\n  forward\n    compile"


def test_exporting_a_model_records_nothing() -> None:
    """torch.export runs a model's Python to see what it does; that is no forward."""
    ci.profile()
    exported = torch.export.export(_model().eval(), (X,))
    tree = finished_tree()
    assert tree == "cirron.session"
    assert exported.module()(X).shape == (2, 1)


PROGRAM = """
    import torch
    import cirron_otel as ci
    import sys

    ci.profile()
    assert "torch._dynamo" not in sys.modules
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())

    def body(x):
        with ci.scope("inside"):
            ci.mark("here", 1)
            return model(x)

    compiled = torch.compile(body, fullgraph=True, backend="eager")
    for _ in range(3):
        compiled(torch.ones(2, 3))
    print(len(ci.health()["swallowed_errors"]))
"""


def test_the_compiler_may_load_later(run_program: RunProgram) -> None:
    """``profile()`` does not load the compiler; when it loads, the helpers are known to it."""
    run: ProgramRun = run_program(PROGRAM)
    assert run.stdout == "0\n"
    assert tree_text(run) == "cirron.session\n  compile"
