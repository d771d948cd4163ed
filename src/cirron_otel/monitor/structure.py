"""Which BatchNorm and which ReLU follow a layer, seen in the first forward passes.

By dataflow: a module follows another one if what it is given *is* the tensor that the other one
returned, unchanged in between. And by the graph of autograd, which says whether anybody else uses
that tensor: see :func:`blockers`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as global_hooks

from cirron_otel._guard import Guard
from cirron_otel.monitor.activity import channel_peaks, keep_largest
from cirron_otel.monitor.hooking import Hook, Hooks, learns, tensors_in
from cirron_otel.monitor.kinds import channels, is_batchnorm, is_relu, producer_base, tensor_of
from cirron_otel.monitor.modules import version_of

#: Nodes of a ReLU that is called as a function.
_RELU_NODES = frozenset({"ReluBackward0"})
#: As well those of ReLU6, of modules that were seen to be one.
_CLOSING_NODES = _RELU_NODES | {"HardtanhBackward0"}
#: Nodes of activations that put out next to nothing below some input: there the slope is less than
#: 1e-6 (GELU, SiLU, ELU), or zero.
_ZERO_BELOW = {
    "GeluBackward0": -5.4,
    "SiluBackward0": -17.0,
    "EluBackward0": -14.0,
    "HardswishBackward0": -3.0,
    "HardsigmoidBackward0": -3.0,
}
#: Nodes that only change the number type: who uses their result uses what they were given.
_CASTS = frozenset({"ToCopyBackward0"})
#: Parts of the names of nodes that layers and BatchNorms make, and of those that they make behind
#: them, which change no number.
_COMPUTED = ("Convolution", "Conv", "Addmm", "MmBackward", "Linear", "BatchNorm")
_SHAPES = frozenset(
    {
        *_CASTS, "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0",
        "SqueezeBackward1", "TransposeBackward0",
    }
)  # fmt: skip
_DEEPEST = 4


class Structure(NamedTuple):
    """What was seen. Names are those of modules in the model."""

    #: Producer to the BatchNorm that it feeds.
    pairs: dict[str, str]
    #: Layers whose output a ReLU takes.
    relu_after: frozenset[str]
    #: Where the walk began: ``loss``, ``model outputs``, or None where there was no graph.
    graph: str | None
    #: Producer to why nothing can ever be proven about its channels, for those that have a ReLU.
    blocked: dict[str, str]
    #: Whether a forward pass in training mode was seen at all.
    seen: bool
    #: Layers whose output another activation takes, and below which input that is next to zero.
    zero_below: Mapping[str, float] = MappingProxyType({})

    def quiet_below(self, producer: str) -> float | None:
        """Below which value an output of the layer never counts; None where there is none."""
        name = self.pairs.get(producer, producer)
        return 0.0 if name in self.relu_after else self.zero_below.get(name)

    def has_relu(self, producer: str) -> bool:
        """Whether a ReLU follows the producer, or the BatchNorm that it feeds."""
        return self.pairs.get(producer, producer) in self.relu_after


class _Out(NamedTuple):
    """A tensor that a module returned, while it lives, as it was then."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    name: str


class Discovery:
    """Hooks for the first sampled window; :meth:`finish` says what they saw."""

    def __init__(self, model: nn.Module, universe: Mapping[str, nn.Module], guard: Guard) -> None:
        self._hooks = Hooks(guard)
        self._producers = {
            name for name, module in universe.items() if producer_base(module) is not None
        }
        self._outs: dict[int, _Out] = {}
        self._sources: dict[str, set[str | None]] = {}
        self._relu_after: set[str] = set()
        #: The nodes of autograd that made the last output of a module, and those ReLUs made.
        self._nodes: dict[str, Any] = {}
        self._relu_nodes: set[Any] = set()
        self._roots: list[Any] = []
        self._runs: Counter[str] = Counter()
        self._passes = 0
        self._sizes: dict[str, int] = {}
        self._universe = universe
        #: The largest output of each channel, by module.
        self.peaks: dict[str, torch.Tensor] = {}
        self._install(model, universe)

    def _install(self, model: nn.Module, universe: Mapping[str, nn.Module]) -> None:
        hooks = self._hooks
        hooks.before(model, self._pass_begins)
        hooks.after(model, self._pass_ends)
        for name, module in universe.items():
            norm = is_batchnorm(module)
            if norm and tensor_of(module, "weight") is not None:
                hooks.before(module, self._into_batchnorm, name)
            if norm or name in self._producers:
                self._sizes[name] = channels(module)
                hooks.after(module, self._out_of, name)
        for module in model.modules():
            if is_relu(module):
                hooks.before(module, self._into_relu)
                hooks.after(module, self._out_of_relu)

    # --- what the hooks see --------------------------------------------------------------------

    def _pass_begins(self, module: nn.Module, _args: object) -> None:
        if learns(module):
            self._passes += 1
            self._outs.clear()
            self._nodes.clear()
            self._relu_nodes.clear()

    def _pass_ends(self, module: nn.Module, _args: object, output: object) -> None:
        if learns(module):
            self._roots = [t.grad_fn for t in tensors_in(output) if t.grad_fn is not None]

    def _out_of(self, name: str, module: nn.Module, _args: object, output: object) -> None:
        if learns(module) and isinstance(output, torch.Tensor):
            self._runs[name] += 1
            self._outs[id(output)] = _Out(weakref.ref(output), version_of(output), name)
            self._nodes[name] = output.grad_fn
            keep_largest(self.peaks, name, channel_peaks(module, output.detach()))

    def _source(self, args: Any) -> str | None:  # noqa: ANN401 - a hook's arguments
        """The layer whose output a module was given, unchanged."""
        given = args[0] if args else None
        if not isinstance(given, torch.Tensor):
            return None
        out = self._outs.get(id(given))
        if out is None or out.version != version_of(given) or out.tensor() is not given:
            return None
        return out.name

    def _into_batchnorm(self, name: str, module: nn.Module, args: object) -> None:
        if learns(module):
            self._sources.setdefault(name, set()).add(self._source(args))

    def _into_relu(self, module: nn.Module, args: object) -> None:
        if learns(module) and (source := self._source(args)) is not None:
            self._relu_after.add(source)

    def _out_of_relu(self, _module: nn.Module, _args: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and output.grad_fn is not None:
            self._relu_nodes.add(output.grad_fn)

    # --- the answer ------------------------------------------------------------------------------

    def finish(self, loss: object) -> Structure:
        """Take the hooks away and say what was seen. ``loss`` is a tensor, or a node, or None."""
        self._hooks.remove()
        pairs = self._pairs()
        root = getattr(loss, "grad_fn", loss) if loss is not None else None
        has_graph = root is not None and hasattr(root, "next_functions")
        roots = [root] if has_graph else self._roots
        graph = ("loss" if has_graph else "model outputs") if roots else None
        consumers = _consumers(roots)
        below = self._activations(consumers)
        found = Structure(pairs, frozenset(self._relu_after), graph, {}, self._passes > 0, below)
        uses = _uses_of_parameters(consumers)
        for producer in self._producers:
            if found.has_relu(producer):
                why = self._blocker(producer, pairs.get(producer), graph, consumers)
                why = why or self._direct_use(producer, pairs.get(producer), uses)
                if why is not None:
                    found.blocked[producer] = why
        self.forget()
        return found

    def _activations(self, consumers: Mapping[Any, list[Any]]) -> dict[str, float]:
        """Take in ReLUs that are called as functions; give other activations with a zero region."""
        below: dict[str, float] = {}
        for name, node in self._nodes.items():
            for user in _users(node, consumers):
                kind = "" if user is _RETURNED else user.name()
                if kind in _RELU_NODES:
                    self._relu_after.add(name)
                    self._relu_nodes.add(user)
                elif kind in _ZERO_BELOW:
                    below[name] = _ZERO_BELOW[kind]
        return below

    def forget(self) -> None:
        """Take the hooks away and let go of tensors and graphs."""
        self._hooks.remove()
        self._outs.clear()
        self._nodes.clear()
        self._relu_nodes.clear()
        self._roots.clear()

    def _pairs(self) -> dict[str, str]:
        fed: dict[str, list[str]] = {}
        for batchnorm, sources in self._sources.items():
            (source, *more) = sources
            if not more and source in self._producers:
                fed.setdefault(source, []).append(batchnorm)
        return {
            producer: batchnorms[0]
            for producer, batchnorms in fed.items()
            if len(batchnorms) == 1 and self._sizes[batchnorms[0]] == self._sizes[producer]
        }

    def _blocker(  # noqa: PLR0911 - one premise after the other
        self, producer: str, batchnorm: str | None, graph: str | None,
        consumers: Mapping[Any, list[Any]],
    ) -> str | None:  # fmt: skip
        """Why the premises of a certificate do not hold for a layer, as far as structure goes."""
        chain = [producer] if batchnorm is None else [producer, batchnorm]
        expected = max(1, self._passes)
        for name in chain:
            if self._runs[name] != expected:
                return (
                    f"{name!r} ran {self._runs[name]} times in {expected} forward passes: it must "
                    "run exactly once in each"
                )
        if graph is None:
            return "no autograd graph was there at the first check: pass the loss tensor to step()"
        for place, name in enumerate(chain):
            node = self._nodes.get(name)
            if node is None:
                return f"the output of {name!r} has no gradient function"
            after, why = _sole_consumer(node, consumers)
            why = why or _why_not_its_own(self._universe[name], node)
            if why is not None:
                return f"the output of {name!r} {why}"
            if place + 1 < len(chain):
                if after is not self._nodes.get(chain[place + 1]):
                    return f"the output of {name!r} is not used by {chain[place + 1]!r} alone"
            elif after not in self._relu_nodes:
                return f"the output of {name!r} is used by something else than a ReLU"
        return None

    def _direct_use(
        self, producer: str, batchnorm: str | None, uses: Mapping[int, int]
    ) -> str | None:
        """Whether something else than the layers uses their parameters: a penalty, a tied layer."""
        for name in (producer, batchnorm):
            own = {} if name is None else self._universe[name]._parameters  # noqa: SLF001
            for key, parameter in own.items():
                count = uses.get(id(parameter), 1)
                if count != 1:
                    return (
                        f"'{name}.{key}' is used {count} times in the graph: the loss depends on "
                        "it past the layer too"
                    )
        return None


class Consumers:
    """Who uses what in the graph of one loss. Walked through when somebody first asks."""

    def __init__(self, root: object) -> None:
        self._root: Any = getattr(root, "grad_fn", root)
        self._found: dict[Any, list[Any]] | None = None

    def why_no_relu(self, node: object) -> str | None:
        """Why a result is not used by a ReLU alone; None where it is, or is not in the graph."""
        if node is None or not hasattr(self._root, "next_functions"):
            return None
        if self._found is None:
            self._found = _consumers([self._root])
        if node not in self._found:  # of a pass that is not learned from
            return None
        user, why = _sole_consumer(node, self._found)
        if why is not None:
            return f"its output {why}"
        if user.name() not in _CLOSING_NODES:
            return "its output is used by something else than a ReLU now"
        return None


_RETURNED = object()


def _consumers(roots: list[Any]) -> dict[Any, list[Any]]:
    """For each node of the graph the nodes that use its result, once an edge."""
    found: dict[Any, list[Any]] = {root: [_RETURNED] for root in roots}
    waiting = list(found)
    while waiting:
        node = waiting.pop()
        for before, _ in node.next_functions:
            if before is None:
                continue
            if before not in found:
                found[before] = []
                waiting.append(before)
            found[before].append(node)
    return found


def _uses_of_parameters(consumers: Mapping[Any, list[Any]]) -> dict[int, int]:
    """How many nodes use each parameter that is in the graph, by its id."""
    found: dict[int, int] = {}
    for node in consumers:
        variable = getattr(node, "variable", None)
        if variable is not None:
            found[id(variable)] = sum(1 for _ in _users(node, consumers))
    return found


def _users(node: Any, consumers: Mapping[Any, list[Any]]) -> Iterator[Any]:  # noqa: ANN401 - autograd's nodes
    """Who uses a result, number casts seen through, once an edge."""
    for user in consumers.get(node, ()):
        if user is not _RETURNED and user.name() in _CASTS:
            yield from _users(user, consumers)
        else:
            yield user


def _why_not_its_own(module: nn.Module, node: Any) -> str | None:  # noqa: ANN401 - autograd's nodes
    """Whether a forward hook of the program's has put something else in the output's place."""
    hooks = (*module._forward_hooks.values(), *global_hooks._global_forward_hooks.values())  # noqa: SLF001
    if all(isinstance(hook, Hook) for hook in hooks):
        return None
    for _ in range(_DEEPEST):
        name = node.name()
        if any(part in name for part in _COMPUTED):
            return None
        if name not in _SHAPES or not node.next_functions or node.next_functions[0][0] is None:
            break
        node = node.next_functions[0][0]
    return "is not what the layer computed: a forward hook of the program's may change it"


def _sole_consumer(node: Any, consumers: Mapping[Any, list[Any]]) -> tuple[Any, str | None]:  # noqa: ANN401 - autograd's nodes
    """The one node that uses a result, or why there is no such one."""
    if node not in consumers:
        return None, "is not part of the graph of the loss"
    users = list(_users(node, consumers))
    if _RETURNED in users:
        return None, "is returned from the model"
    if len(users) != 1:
        return None, f"is used {len(users)} times"
    return users[0], None
