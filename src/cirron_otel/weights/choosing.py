"""Which models a snapshot is of: those that are watched, and those that a framework trains.

A framework's hook says which model its loop trains (:meth:`DrivenLoop.trains`), so such a model
need not be given to ``ci.watch``. Where it was, or a part of it, or what it is a part of, that
decides what is looked at, and under which name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cirron_otel.driven import active_loop
from cirron_otel.watching import WatchedModel, named, watched
from cirron_otel.weights.tensors import weights

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder

#: Wrappers that keep the same values on every rank.
_REPLICAS = frozenset({"DistributedDataParallel"})


def at_boundary(rec: Recorder, epoch_id: str | None) -> list[WatchedModel]:
    """The watched models, and those that a framework trains here or has trained in this epoch."""
    loop = active_loop(rec)
    trained = [] if loop is None or loop.model is None else [loop.model]
    if epoch_id is not None:
        trained += watched.trained(epoch_id)
    return _beside(watched.entries, trained)


def all_known() -> list[WatchedModel]:
    """The watched models, and those that a framework trains or has trained."""
    return _beside(watched.entries, watched.trained())


def given(model: object) -> list[WatchedModel]:
    """A model, under the name that its tensors have at the ends of epochs where it is known."""
    entries = all_known()
    several = len(entries) > 1
    known = [
        entry._replace(named=entry.named or several) for entry in entries if entry.model is model
    ]
    return known or [WatchedModel(model, type(model).__name__, named=False, buffers=False)]


def _beside(entries: list[WatchedModel], trained: list[object]) -> list[WatchedModel]:
    """``entries``, and the trained models that share no parameter with one of them."""
    if not trained:
        return entries
    others: list[object] = []
    taken = {owner for entry in entries for owner in _owners(entry.model)}
    for model in trained:
        is_new = not any(model is known for known in others)
        if is_new and not (entries and taken & _owners(model)):
            others.append(model)
    if not others:
        return entries
    return named(
        [
            *(
                (entry.model, entry.name if entry.named else None, entry.buffers)
                for entry in entries
            ),
            *((model, None, False) for model in others),
        ]
    )


def _owners(model: object) -> set[int]:
    """Identities of the model and of its parameters."""
    try:
        return {id(model), *(tensor.owner for tensor in weights(model))}
    except Exception:  # noqa: BLE001 - said where its weights are looked for
        return {id(model)}


def is_replica(rec: Recorder, model: object) -> bool:
    """Whether every rank has the same values, as ``DistributedDataParallel`` sees to.

    Also of a model inside such a wrapper, once the wrapper was called on this thread.
    """
    if type(model).__name__ in _REPLICAS:
        return True
    learner: Any = getattr(getattr(rec.torch_phases, "here", None), "learner", None)
    wrapper = None if learner is None else learner()
    if type(wrapper).__name__ not in _REPLICAS:
        return False
    own = _owners(model) - {id(model)}
    return bool(own) and own <= _owners(wrapper)
