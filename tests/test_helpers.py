"""The tests' own tools: a mistake here would make other tests pass for no reason."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from cirron_otel.batch import Batch, MarkRecord, SpanRecord
from helpers import Rows, RunProgram, StartProgram, read_spool, tree_text

ENDED = 10


def _span(
    span_id: str, parent: str | None, start: int, *, index: int | None = None, **attrs: object
) -> SpanRecord:
    name = span_id.rstrip("0123456789")
    return SpanRecord(span_id, name, parent, index, start, ENDED, attrs=dict(attrs))


def _rows(*spans: SpanRecord, **keys: object) -> Rows:
    return Rows([Batch(1, "0", "b", 0, spans=list(spans), **keys)])  # type: ignore[arg-type]


def test_tree_text_orders_by_start_and_indents_by_depth() -> None:
    """Rows come as spans end, children first; the text shows parents first, siblings by start."""
    mark = MarkRecord("m", "step1", "loss", "float", 0.5, {}, 3, "point")
    rows = _rows(
        _span("step1", "epoch0", 3, index=1),
        _span("step0", "epoch0", 2, index=0, worker_id=7),
        _span("epoch0", "cirron.session", 1, index=0),
        _span("cirron.session", None, 0),
        marks=[mark, mark],
    )
    assert tree_text(rows, marks=True, attrs=["worker_id"]) == (
        "cirron.session\n  epoch[0]\n    step[0] worker_id=7\n    step[1] {loss}"
    )
    assert tree_text(rows, without=["epoch"]) == "cirron.session"


def test_tree_text_never_hides_what_is_wrong() -> None:
    """A lost parent, an open span, a double id and a ring of parents are all visible."""
    opened = _span("epoch1", "cirron.session", 1, index=1)
    assert tree_text(_rows(_span("step0", "nowhere", 0), open=[opened], writer="w")) == (
        "step (parent missing)\nepoch[1] (open) (parent missing)"
    )
    with pytest.raises(AssertionError, match="one id"):
        tree_text(_rows(_span("a", None, 0), _span("a", None, 0)))
    with pytest.raises(AssertionError, match="ancestors"):
        tree_text(_rows(_span("a", "b", 0), _span("b", "a", 0), _span("c", None, 0)))


def test_rows_open_is_what_the_newest_batch_says() -> None:
    """A later batch of the same writer replaces the list, and a closed span is not open."""
    first = Batch(1, "0", "b0", 0, writer="w", open=[_span("a", None, 0)])
    second = Batch(1, "0", "b1", 1, writer="w", open=[_span("b", None, 0), _span("c", None, 0)])
    third = Batch(1, "0", "b2", 2, writer="w", spans=[_span("c", None, 0)])
    assert [span.id for span in Rows([first, second, third]).open] == ["b"]


def test_the_environment_of_a_test_is_clean(tmp_path: Path) -> None:
    """A test sees no setting from outside, and works in an empty directory of its own."""
    ours = {name for name in os.environ if name.startswith(("CIRRON_", "OTEL_"))}
    assert ours == {"CIRRON_OTEL_STRICT"}
    assert Path.cwd() == tmp_path
    assert not (Path.home() / ".cirron").exists()
    assert read_spool().batches == []


WRITES_ONE_BATCH = """
    import os, sys
    from pathlib import Path
    from cirron_otel.batch import Batch, SpanRecord, encode

    spool = Path(os.environ.get("CIRRON_OUTPUT_DIR", ".cirron"), "spool")
    spool.mkdir(parents=True)
    batch = Batch(1, "0", "b", 5, spans=[SpanRecord("i", os.environ["WORD"], None, None, 1, 2)])
    (spool / f"{5:020d}-{0:032x}.json").write_bytes(encode(batch))
    sys.exit(int(sys.argv[1]))
"""


def test_run_program_gives_exit_status_output_and_rows(run_program: RunProgram) -> None:
    """A program runs with the library on its path, and its spool is read wherever it lies."""
    run = run_program(WRITES_ONE_BATCH, {"WORD": "hello"}, args=["3"], expect=3)
    assert (run.completed.returncode, tree_text(run)) == (3, "hello")
    elsewhere = {"WORD": "there", "CIRRON_OUTPUT_DIR": "elsewhere"}
    assert run_program(WRITES_ONE_BATCH, elsewhere, args=["0"]).one("there").end_ns == 2


def test_run_program_fails_the_test_on_an_unexpected_status(run_program: RunProgram) -> None:
    """The failure shows what the program said."""
    with pytest.raises(pytest.fail.Exception, match=r"(?s)exit status 1, not 0.*KeyError: 'WORD'"):
        run_program(WRITES_ONE_BATCH)


def test_start_program_leaves_it_running(start_program: StartProgram) -> None:
    """The test can wait for a line and send a signal."""
    process = start_program("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == -signal.SIGTERM
