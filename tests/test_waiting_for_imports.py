"""Waiting for a module to be imported."""

from __future__ import annotations

import functools
import gc
import importlib
import sys
import weakref
from pathlib import Path
from types import ModuleType

import pytest

from cirron_otel.imports import _waiting, is_importable, when_imported
from helpers import RunProgram


class Listener:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def loaded(self, module: ModuleType) -> None:
        """Note one."""
        self.told.append(module.__name__)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that can be imported and has not been."""
    name = "a_module_that_comes_late"
    (tmp_path / f"{name}.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_each_is_told_once(module: str) -> None:
    """Those who waited when it comes, and who asks afterwards at once."""
    first, second, late = Listener(), Listener(), Listener()
    when_imported(module, first.loaded)
    when_imported(module, second.loaded)
    assert (first.told, second.told) == ([], [])
    importlib.import_module(module)
    when_imported(module, late.loaded)
    assert first.told == second.told == late.told == [module]
    del sys.modules[module]


def test_who_waits_is_not_kept(module: str) -> None:
    """Recordings come and go before the module does: none is held, and the list does not grow."""
    gone = Listener()
    seen = weakref.ref(gone)
    when_imported(module, gone.loaded)
    del gone
    gc.collect()
    assert seen() is None
    for _ in range(100):
        when_imported(module, Listener().loaded)
    assert len(_waiting[module]) <= 1
    last = Listener()
    when_imported(module, last.loaded)
    importlib.import_module(module)
    assert last.told == [module]
    del sys.modules[module]


def test_who_asks_twice_is_told_once(module: str) -> None:
    """A function or a partial one may wait as well; asking again while one waits adds nothing."""
    told: list[str] = []

    def loaded(found: ModuleType) -> None:
        told.append(found.__name__)

    partial = functools.partial(lambda mine, found: mine.append(found.__name__), told)
    for _ in range(3):
        for waiting in (loaded, partial, loaded):
            when_imported(module, waiting)
    importlib.import_module(module)
    assert told == [module] * 2
    del sys.modules[module]


def test_what_may_not_be_imported_is_not_importable(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that lies there is, one that nobody has or that an import refuses is not."""
    assert is_importable(module)
    assert not is_importable("a_module_that_never_comes.below")
    monkeypatch.setitem(sys.modules, module, None)
    assert not is_importable(module)


PROGRAM = """
    import gc
    import sys
    import weakref
    import torch
    import cirron_otel as ci
    from cirron_otel import recorder

    for _ in range(2):
        ci.profile(frameworks=["torch"])
        seen = weakref.ref(recorder._current)
        ci.shutdown()
    ci.profile(frameworks=[])
    gc.collect()
    print(seen() is None, "torch._dynamo" in sys.modules, "safetensors.torch" in sys.modules)
    ci.shutdown()
"""


def test_a_hook_that_waits_keeps_no_recording(run_program: RunProgram) -> None:
    """What the hook into torch waits for may never come: its recording goes when it has ended."""
    assert run_program(PROGRAM, measured=False).stdout == "True False False\n"
