"""Waiting for a module to be imported."""

from __future__ import annotations

import gc
import importlib
import sys
import weakref
from pathlib import Path
from types import ModuleType

import pytest

from cirron_otel.imports import _waiting, when_imported


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
