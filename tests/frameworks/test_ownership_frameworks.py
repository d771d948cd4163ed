"""Which hooks ``frameworks=`` puts in place, and what is said of those that are missing."""

from __future__ import annotations

import importlib.util
import sys

import pytest

import cirron_otel as ci
from cirron_otel.hooks import FRAMEWORKS
from cirron_otel.setting_rules import FRAMEWORKS as NAMES
from helpers import RunProgram

HIDE = """
    import importlib.abc, sys

    class Hidden(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in {hidden!r}:
                raise ModuleNotFoundError(name)

    sys.meta_path.insert(0, Hidden())
    import cirron_otel as ci
"""


def test_every_name_that_may_be_given_is_known_to_the_hooks() -> None:
    """The setting and the hooks know the same frameworks, in the same order."""
    assert tuple(FRAMEWORKS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_named_framework_that_is_missing_is_an_error(name: str, run_program: RunProgram) -> None:
    """It says what to install, before anything is recorded."""
    run = run_program(
        HIDE.format(hidden=FRAMEWORKS[name].packages)
        + f"""
    try:
        ci.profile(frameworks=[{name!r}])
    except ci.CirronDependencyError as error:
        print(error)
    """,
    )
    assert f"names {name}, which is not installed: " in run.stdout
    assert FRAMEWORKS[name].install in run.stdout
    assert not run.spans


def test_missing_frameworks_that_nobody_named_are_silent(run_program: RunProgram) -> None:
    """Without ``frameworks=`` a program that has none of them is recorded without a word."""
    hidden = tuple(package for known in FRAMEWORKS.values() for package in known.packages)
    run = run_program(
        HIDE.format(hidden=hidden)
        + """
    with ci.profile(snapshots=None) as profiler:
        print(profiler.installed_hooks)
    """,
    )
    assert run.stdout == "[]\n"
    assert run.stderr == ""
    assert len(run.spans) == 1


def test_profile_imports_no_framework(run_program: RunProgram) -> None:
    """Hooks wait for the program to import what it uses."""
    run = run_program(
        """
        import sys
        import cirron_otel as ci

        ci.profile(snapshots=None)
        print(sorted({"torch", "transformers", "keras", "lightning", "sklearn"} & set(sys.modules)))
        ci.shutdown()
        """
    )
    assert run.stdout == "[]\n"


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_frameworks_limits_the_hooks() -> None:
    """``frameworks=[]`` puts none in place, a list only those."""
    assert "torch" in sys.modules or importlib.import_module("torch")
    with ci.profile(frameworks=[], snapshots=None) as profiler:
        assert profiler.installed_hooks == []
    with ci.profile(frameworks=["torch"], snapshots=None) as profiler:
        assert profiler.installed_hooks == ["torch"]
