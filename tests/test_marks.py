"""Marks on scopes: where they land, what they bear, what is dropped and said about it."""

from __future__ import annotations

import inspect
import logging
import math
import pickle
import time
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import UNSET

import cirron_otel as ci
from cirron_otel import recorder, semconv
from cirron_otel.batch import MAX_MARK_IDS, MarkRecord
from helpers import Rows, RunProgram, read_spool


@pytest.fixture(autouse=True)
def _recording() -> None:
    """Every test here records into its own directory."""
    ci.profile(frameworks=[])


def finished() -> Rows:
    """Everything that was recorded, after an orderly shutdown."""
    assert ci.shutdown()
    return read_spool()


def own(rows: Rows) -> list[MarkRecord]:
    """The marks that the test made, in the order it made them."""
    return sorted((m for m in rows.marks if m.name != semconv.OVERHEAD), key=lambda m: m.ts_ns)


def test_a_mark_lands_on_the_innermost_open_scope() -> None:
    """With none open it lands on the session, never on nothing."""
    before = time.time_ns()
    ci.mark("on session", 1)
    with ci.scope("outer"):
        ci.mark("on outer", 2)
        with ci.scope("inner"):
            ci.mark("on inner", 3)
        ci.mark("on outer", 4)
    rows = finished()
    names = {one.id: one.name for one in rows.spans}
    assert [(m.name, names[m.span_id]) for m in own(rows)] == [
        ("on session", "cirron.session"), ("on outer", "outer"), ("on inner", "inner"),
        ("on outer", "outer"),
    ]  # fmt: skip
    inner = rows.one("inner")
    assert inner.mark_ids == tuple(m.id for m in rows.marks_of(inner))
    assert all(before - 2_000_000 <= m.ts_ns <= time.time_ns() + 2_000_000 for m in own(rows))


@pytest.mark.parametrize(
    ("value", "kind", "expected", "nonfinite"),
    [
        (0.5, "float", 0.5, UNSET),
        (3, "int", 3, UNSET),
        (True, "bool", True, UNSET),
        ("text", "string", "text", UNSET),
        (2**63, "float", 2.0**63, UNSET),
        (math.nan, "float", None, "nan"),
        (math.inf, "float", None, "inf"),
        (-math.inf, "float", None, "-inf"),
        (Decimal("0.1"), "float", 0.1, UNSET),
        (np.float32(0.25), "float", 0.25, UNSET),
        (np.array([4]), "int", 4, UNSET),
        (torch.tensor(0.5, dtype=torch.bfloat16), "float", 0.5, UNSET),
        (torch.tensor([math.nan]), "float", None, "nan"),
        ("\ud800\0", "string", "\ufffd\ufffd", UNSET),
        ("\u20ac" * 200, "string", "\u20ac" * 85, UNSET),
    ],
)
def test_values_reach_the_spool_as_they_are(
    value: object, kind: str, expected: object, nonfinite: object
) -> None:
    """Value and type are on disk as given; what is not finite is named beside a null (E.47)."""
    with ci.scope("x"):
        ci.mark("m", value)
    (mark,) = own(finished())
    assert (mark.value_type, mark.value, mark.value_nonfinite) == (kind, expected, nonfinite)
    assert (mark.kind, mark.attrs) == ("point", {})


def test_a_tensors_value_is_the_one_it_had() -> None:
    """A later in-place write does not change what was marked."""
    loss = torch.tensor(1.0)
    ci.mark("loss", loss)
    loss.add_(1)
    ci.mark("loss", loss)
    assert [m.value for m in own(finished())] == [1.0, 2.0]


def test_names_and_attributes_of_any_kind() -> None:
    """``name``, ``value`` and ``self`` are legal attributes; names become clean text."""
    ci.mark("plain", 1, name="n", value="v", self="s", note=[1, {"a": math.nan}])
    ci.mark(7, 1)  # type: ignore[arg-type]
    ci.mark("\ud800 \0", 1.0)
    ci.mark("long" * 1000, 1.0)
    ci.mark(name="by keyword", value=5, kind="summary", step=3)
    first, second, third, fourth, fifth = own(finished())
    assert first.attrs == {"name": "n", "value": "v", "self": "s", "note": [1, {"a": "nan"}]}
    assert second.name == "7"
    assert third.name == "\ufffd \ufffd"
    assert fourth.name == ("long" * 1000)[:1024]
    assert (fifth.name, fifth.value, fifth.kind, fifth.attrs) == (
        "by keyword", 5, "summary", {"step": 3},
    )  # fmt: skip


def test_kinds(caplog: pytest.LogCaptureFixture) -> None:
    """``point`` and ``summary``; anything else is a point and said once."""
    for kind in ("point", "summary", "histogram", "other"):
        ci.mark("m", 1, kind=kind)
    assert [m.kind for m in own(finished())] == ["point", "summary", "point", "point"]
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "'histogram'" in warnings[0]


class _Hostile:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __float__(self) -> float:
        raise RuntimeError("no float")


def test_what_is_no_scalar_is_dropped_counted_and_explained_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each name is warned of once, with what to use instead; nothing raises (C-W19, E.49)."""
    for _ in range(3):
        ci.mark("none", None)
        ci.mark("array", np.zeros(3))
        ci.mark("grads", torch.zeros(2, 2))
        ci.mark("dict", {"a": 1})
        ci.mark("hostile", _Hostile())
        ci.mark("complex", 1j)
    health = ci.health()
    assert health["mark_drop_count"] == 18
    assert health["losses"] == {"unsupported_mark_value": 18}
    assert health["swallowed_error_count"] == 0
    assert own(finished()) == []
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 6
    assert ".mean()" in next(text for text in warnings if "'array'" in text)
    assert "leave the mark out" in next(text for text in warnings if "'none'" in text)


def test_early_marks_belong_to_root() -> None:
    """Marks before ``profile()`` are kept, with their time, under the ``"root"`` sentinel."""
    ci.shutdown()
    before = time.time_ns()
    ci.mark("early", 0.5, note="n")
    ci.mark("bad early", None)
    after = time.time_ns()
    time.sleep(0.02)
    ci.profile(frameworks=[])
    (mark,) = own(finished())
    assert (mark.span_id, mark.name, mark.value) == ("root", "early", 0.5)
    assert mark.attrs == {"note": "n"}
    assert before <= mark.ts_ns <= after


def test_marks_after_shutdown_wait_for_the_next_recording() -> None:
    """They belong to nobody: ``"root"`` again, in the spool of the next ``profile()``."""
    finished()
    ci.mark("late", 1)
    assert own(read_spool()) == []
    ci.profile(frameworks=[])
    (mark,) = own(finished())
    assert (mark.span_id, mark.name) == ("root", "late")


def test_early_marks_are_bounded() -> None:
    """Without a recording at most the last 10,000 marks are kept."""
    ci.shutdown()
    for number in range(10_050):
        ci.mark("m", number)
    ci.profile(frameworks=[])
    values = [m.value for m in finished().marks if m.name == "m"]
    assert values == list(range(50, 10_050))


def test_marks_on_a_scope_that_has_ended_go_to_its_parent() -> None:
    """A generator's leaked scope takes no marks after its end."""
    scope = ci.scope("inner")
    with ci.scope("outer"):
        scope.__enter__()
        scope.__exit__(None, None, None)
        ci.mark("m", 1)
    rows = finished()
    (mark,) = own(rows)
    assert mark.span_id == rows.one("outer").id


def test_a_scope_lists_its_first_marks_and_counts_all() -> None:
    """``mark_ids`` ends at 1,024, ``mark_count`` has the number; else it is absent (C-W18)."""
    with ci.scope("few"):
        for _ in range(MAX_MARK_IDS):
            ci.mark("m", 1)
    with ci.scope("many"):
        for number in range(MAX_MARK_IDS + 500):
            ci.mark("m", number, odd=number % 2) if number % 7 == 0 else ci.mark("m", number)
    rows = finished()
    few, many = rows.one("few"), rows.one("many")
    assert (len(few.mark_ids), few.mark_count) == (MAX_MARK_IDS, UNSET)
    assert (len(many.mark_ids), many.mark_count) == (MAX_MARK_IDS, MAX_MARK_IDS + 500)
    made = rows.marks_of(many)
    assert len(made) == MAX_MARK_IDS + 500
    assert set(many.mark_ids) <= {m.id for m in made}


def test_two_hundred_thousand_marks_on_the_session(run_program: RunProgram) -> None:
    """The session's row stays small, no file passes 4 MB, no mark is lost (C-W18, E.52)."""
    run = run_program(
        """
        import cirron_otel as ci
        ci.profile(frameworks=[])
        for number in range(200_000):
            ci.mark("loss", 0.5)
        assert ci.shutdown()
        assert ci.health()["mark_drop_count"] == 0
        """,
        measured=False,
    )
    sizes = [file.stat().st_size for file in (run.output_dir / "spool").glob("*.json")]
    assert max(sizes) < 4_000_000
    session = run.one("cirron.session")
    assert (len(session.mark_ids), session.mark_count) == (MAX_MARK_IDS, 200_000)
    assert len({m.id for m in run.marks if m.span_id == session.id}) == 200_000


def test_a_program_under_warnings_as_errors_never_crashes(run_program: RunProgram) -> None:
    """``-W error`` turns no warning of ours into an exception: we log (C-W19)."""
    run = run_program(
        """
        import subprocess, sys
        if len(sys.argv) == 1:
            sys.exit(subprocess.call([sys.executable, "-W", "error", __file__, "again"]))
        import cirron_otel as ci
        ci.profile(frameworks=[])
        ci.profile(frameworks=[])
        ci.mark("none", None)
        ci.mark("kind", 1, kind="x")
        again = ci.scope("again", index="x")
        with again, again:
            pass
        def deep(left):
            with ci.scope("deep"):
                left and deep(left - 1)
        deep(70)
        for _ in ci.epochs(range(1)):
            for _ in ci.epochs(range(1)):
                pass
        for _ in ci.batches(range(1), stage="neither"):
            pass
        """,
        measured=False,
    )
    assert "Traceback" not in run.stderr
    assert len(run.named("deep")) == 64
    assert "profile() was called again" in run.stderr


def test_marks_of_the_recorders_own_error_paths_never_raise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug of ours is swallowed, counted and logged once (decision 19)."""
    monkeypatch.setenv("CIRRON_OTEL_STRICT", "0")
    rec = recorder._current
    assert rec is not None
    broken: Any = rec.clock.monotonic_ns
    rec.clock.monotonic_ns = None  # type: ignore[assignment]
    for _ in range(3):
        ci.mark("m", 1)
    rec.clock.monotonic_ns = broken
    ci.mark("good", 1)
    health = ci.health()
    assert health["swallowed_errors"]["mark"] == 3
    assert health["swallowed_error_count"] >= 3
    assert sum("internal error in mark" in r.getMessage() for r in caplog.records) == 1
    assert [m.name for m in own(finished())] == ["good"]


def test_the_function_says_how_it_is_called() -> None:
    """Compiled or not, ``mark`` has its name, home, text and signature, and can be pickled."""
    parameters = inspect.signature(ci.mark).parameters
    assert list(parameters) == ["name", "value", "kind", "attrs"]
    assert parameters["kind"].default == "point"
    assert [one.kind.name for one in parameters.values()] == [
        "POSITIONAL_ONLY", "POSITIONAL_ONLY", "KEYWORD_ONLY", "VAR_KEYWORD",
    ]  # fmt: skip
    assert (ci.mark.__name__, ci.mark.__module__) == ("mark", "cirron_otel.scopes")
    assert (inspect.getdoc(ci.mark) or "").startswith("A named value on the innermost open scope")
    assert pickle.loads(pickle.dumps(ci.mark)) is ci.mark  # noqa: S301 - our own
    with pytest.raises(TypeError, match="positional"):
        ci.mark("a", 1, 2)  # type: ignore[call-arg]


def test_name_and_value_may_be_attributes_too() -> None:
    """What is given by keyword stands in for what is not given by position."""
    ci.mark(name="loss", value=1.5)
    ci.mark("loss", 2.5, name="a", value=3)
    first, second = own(finished())
    assert (first.name, first.value, first.attrs) == ("loss", 1.5, {})
    assert (second.name, second.value, second.attrs) == ("loss", 2.5, {"name": "a", "value": 3})
