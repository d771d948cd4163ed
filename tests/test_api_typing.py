"""What a type checker makes of the public functions, in a program of a user's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

SRC = Path(__file__).resolve().parent.parent / "src"


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What strict mypy says about a program; the package is looked at once for all of them."""
    home = tmp_path_factory.mktemp("mypy")

    def run(source: str) -> str:
        program = home / "user.py"
        program.write_text(dedent(source), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent",
             f"--cache-dir={home / 'cache'}", str(program)],
            env={"MYPYPATH": str(SRC), "PATH": ""},
            capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        return done.stdout + done.stderr

    return run


@pytest.mark.slow
def test_a_program_keeps_its_types(check: Callable[[str], str]) -> None:
    """Decorated functions stay what they are, scopes are no ``Any``, formats choose the answer."""
    said = check(
        """
        from typing import Any
        import cirron_otel as ci

        @ci.scope("work", index=1, lr=0.1)
        def work(a: int, *, b: str = "") -> float:
            return a / 2

        @ci.scope("later")
        async def later() -> int:
            async with ci.scope("inside") as s:
                s.record_exception(ValueError("x"))
            return 1

        reveal_type(work)
        reveal_type(later)
        with ci.scope("x", 3) as s:
            s.set_attribute("a", 1)
            s.add_event("e", {"k": 1})
            reveal_type(s.id)
        tree: dict[str, Any] = ci.trace("dict")
        text: str = ci.trace("json", last=3)
        p = ci.profile(resources=["cpu"], run_id="r", trace_max_spans=5)
        again: str = p.trace("json")
        other: dict[str, Any] = ci.Cirron().trace("dict", file=None)
        done: bool = ci.Cirron().flush(1.0) and ci.Cirron().shutdown(timeout=1.0)
        """,
    )
    assert "error" not in said
    assert 'def (a: int, *, b: str =) -> float"' in said.replace("builtins.", "")
    assert "Coroutine[Any, Any, int]" in said.replace("builtins.", "")
    assert '"str | None"' in said.replace("builtins.", "")


@pytest.mark.slow
def test_a_wrong_program_is_told_so(check: Callable[[str], str]) -> None:
    """A misspelt keyword, a method that is not there, an answer of the wrong type."""
    said = check(
        """
        import cirron_otel as ci

        ci.profile(resorces=["cpu"])
        with ci.scope("x") as s:
            s.set_atribute("a", 1)
        text: str = ci.trace("dict")
        """,
    )
    assert said.count("error:") == 3
    assert all(part in said for part in ("resorces", "set_atribute", "assignment"))
