"""Reading trees back from a spool, and how they look as text."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from textwrap import dedent

import msgspec
import pytest

from cirron_otel.reading import sessions as tree
from cirron_otel.reading.sessions import NoSuchSessionError, Session, load, select, to_dict, walk
from cirron_otel.reading.text import Options, plain
from cirron_otel.reading.values import duration, parse_duration, text
from cirron_otel.recovery import WriterLock, recover
from spool_by_hand import MS, T0, Writer, hex32, mark, span, training

#: Long after the last batch of every test: a writer without a lock is then not alive.
LATER = T0 + 3_600_000 * MS


def only(root: Path, *, now_ns: int = LATER) -> Session:
    """The one session of a spool, read without an error."""
    errors: list[Exception] = []
    (session,) = load(Writer(root).spool, now_ns=now_ns, on_error=lambda _, exc: errors.append(exc))
    assert errors == []
    return session


def shape(session: Session, options: Options | None = None) -> str:
    """The tree as text."""
    return "\n".join(plain([session.root], options))


def golden(expected: str) -> str:
    """An expected tree from an indented literal."""
    return dedent(expected).strip("\n")


def test_a_training_run_reads_as_its_tree_with_losses(tmp_path: Path) -> None:
    """Steps collapse to the first two and the last, with the mean and the way of the loss."""
    training(tmp_path, epochs=1, steps=20)
    assert shape(only(tmp_path)) == golden("""
        cirron.session              1.0 s   accuracy 0.93 (summary)  framework=torch  device=cpu
        └─ epoch[0]                 1.0 s   val_accuracy 0.85 (summary)  lr=0.01
           ├─ step[0]              50.0 ms  loss 2.3
           │  ├─ data_load          5.0 ms
           │  ├─ forward           15.0 ms
           │  ├─ backward          20.0 ms
           │  └─ optimizer_step     9.0 ms
           ├─ step[1]              50.0 ms  loss 1.917
           │  ├─ data_load          5.0 ms
           │  ├─ forward           15.0 ms
           │  ├─ backward          20.0 ms
           │  └─ optimizer_step     9.0 ms
           ├─ … 17 more steps      50.0 ms  mean  loss 1.643 → 0.5
           └─ step[19]             50.0 ms  loss 0.4792
              ├─ data_load          5.0 ms
              ├─ forward           15.0 ms
              ├─ backward          20.0 ms
              └─ optimizer_step     9.0 ms
    """)


def test_depth_says_what_is_below_and_keeps_the_losses(tmp_path: Path) -> None:
    """A cut branch tells how many spans it has and where their marks went; ASCII is enough."""
    training(tmp_path, epochs=2, steps=20)
    session = only(tmp_path)
    options = Options(depth=1, ascii_only=True, titles={session.id: "run digits-cnn"})
    shown = [line.split("  ") for line in shape(session, options).splitlines()]
    assert [[cell.strip() for cell in line if cell] for line in shown] == [
        ["cirron.session", "2.0 s", "run digits-cnn", "accuracy 0.93 (summary)",
         "framework=torch", "device=cpu"],
        ["|- epoch[0]", "1.0 s", "val_accuracy 0.85 (summary)", "loss 2.3 -> 0.4792", "lr=0.01",
         "+100 spans"],
        ["`- epoch[1]", "1.0 s", "val_accuracy 0.91 (summary)", "loss 0.46 -> 0.2614", "lr=0.01",
         "+100 spans"],
    ]  # fmt: skip


def test_the_overhead_mark_is_shown_only_when_asked_for(tmp_path: Path) -> None:
    """What the instrumentation cost is hidden, and shown as a duration on request."""
    training(tmp_path, epochs=1, steps=2)
    session = only(tmp_path)
    assert "overhead" not in shape(session)
    assert "cirron.overhead_ns 4.2 us" in shape(session, Options(overhead=True))


def test_everything_shows_every_sibling(tmp_path: Path) -> None:
    """With everything asked for, nothing collapses."""
    training(tmp_path, epochs=1, steps=30)
    shown = shape(only(tmp_path), Options(everything=True))
    assert [f"step[{k}]" in shown for k in range(30)] == [True] * 30
    assert "more" not in shown


def test_open_scopes_of_a_living_session_are_shown_with_their_age(tmp_path: Path) -> None:
    """Before the session has ended its tree is there, and says what is open for how long."""
    write = Writer(tmp_path, session="session", writer="host-1-1")
    still = [
        span("session", "cirron.session", None, 0, None),
        span("epoch", "epoch", "session", 100, None, index=3),
    ]
    write.batch(1000, [span("step", "step", "epoch", 200, 300, index=0)], open=still)
    session = only(tmp_path, now_ns=T0 + 3200 * MS)
    assert session.info.live
    assert session.info.ended_ns is None
    assert session.info.spans == 3
    assert shape(session, Options(now_ns=T0 + 3200 * MS)) == golden("""
        cirron.session     3.2 s   open
        └─ epoch[3]        3.1 s   open
           └─ step[0]    100.0 ms
    """)


def test_a_batch_without_the_key_open_leaves_the_set_as_it_was(tmp_path: Path) -> None:
    """The newest batch that has the key decides, not the newest batch."""
    write = Writer(tmp_path, session="session", writer="host-1-1")
    still = [span("session", "cirron.session", None, 0, None)]
    write.batch(1000, [], open=still)
    write.batch(2000, [span("a", "work", "session", 10, 20)])
    session = only(tmp_path, now_ns=T0 + 2500 * MS)
    assert session.info.live
    assert session.root.is_open
    assert [child.span.name for child in session.root.children] == ["work"]


def test_a_lock_decides_who_lives(tmp_path: Path) -> None:
    """A held lock keeps an old session open; a free one closes it at its last batch."""
    lock = WriterLock.acquire(
        tmp_path / "run", host=socket.gethostname(), pid=os.getpid(), start_ns=T0
    )
    write = Writer(tmp_path, session="session", writer=lock.name)
    write.batch(50, [], open=[span("session", "cirron.session", None, 0, None)])
    if not lock.held:
        pytest.skip("this file system has no flock")
    assert only(tmp_path).info.live
    content = lock.path.read_bytes()
    lock.release()
    lock.path.write_bytes(content)  # as the kernel leaves it when a process is killed
    session = only(tmp_path)
    assert not session.info.live
    assert session.info.recovered
    assert session.root.span.end_ns == T0 + 50 * MS
    assert lock.path.exists()  # a reader only reads


def test_a_dead_writers_scopes_read_the_same_before_and_after_the_recovery(
    tmp_path: Path,
) -> None:
    """Closing in memory gives the ends that the recovery batch writes; both say so."""
    write = Writer(tmp_path, session="session", writer="host-1-1")
    still = [
        span("session", "cirron.session", None, 0, None),
        span("epoch", "epoch", "session", 100, None, index=0),
    ]
    write.batch(500, [span("s", "step", "epoch", 110, 120, index=0)], open=still)
    expected = golden("""
        cirron.session   500.0 ms  recovered: the process died
        └─ epoch[0]      400.0 ms  recovered: the process died
           └─ step[0]     10.0 ms
    """)
    before = only(tmp_path)
    assert shape(before) == expected
    assert before.info.recovered
    (path,) = recover(write.spool, sdk_version="1", writers=["host-1-1"])
    assert path.exists()
    after = only(tmp_path)
    assert shape(after) == expected
    assert after.info.recovered
    assert not after.info.live


def test_spans_that_close_after_their_open_row_replace_it(tmp_path: Path) -> None:
    """A closed row wins over an open one of the same id; its marks stay."""
    write = Writer(tmp_path, session="session", writer="host-1-1")
    root = span("session", "cirron.session", None, 0, None)
    write.batch(
        100,
        [],
        [mark("epoch", "loss", 2.0, 50)],
        open=[root, span("epoch", "epoch", "session", 1, None, index=0)],
    )
    closed = span("epoch", "epoch", "session", 1, 150, index=0)
    write.batch(200, [closed], [mark("epoch", "loss", 1.0, 140)], open=[root])
    session = only(tmp_path, now_ns=T0 + 300 * MS)
    assert shape(session, Options(now_ns=T0 + 300 * MS)) == golden("""
        cirron.session   300.0 ms  open
        └─ epoch[0]      149.0 ms  loss 2 → 1 (2 marks)
    """)


def test_duplicates_count_once_and_the_newer_wins(tmp_path: Path) -> None:
    """The same batch under two names, and the same span in two batches, are one each."""
    write = Writer(tmp_path, session="session", writer="w-1-1")
    path = write.batch(100, [span("a", "first", "session", 10, 20)], [mark("a", "loss", 1.0, 15)])
    copy = path.with_name(f"{T0 + 150 * MS:020d}-{path.name[21:]}")
    copy.write_bytes(path.read_bytes())
    write.batch(200, [span("a", "second", "session", 10, 30)])
    write.batch(300, [span("session", "cirron.session", None, 0, 290)], open=[])
    session = only(tmp_path)
    assert [node.span.name for node in walk([session.root])] == ["cirron.session", "second"]
    assert len(session.root.children[0].marks) == 1


def test_spans_of_threads_and_requests_without_a_parent_are_shown(tmp_path: Path) -> None:
    """Batches of another SDK say neither session nor writer: the process and the time decide."""
    write = Writer(tmp_path)
    write.batch(
        500,
        [
            span("request", "request", None, 100, 200),
            span("inner", "generate", "request", 110, 190),
            span("session", "cirron.session", None, 0, 400),
            span("other", "request", None, 100, 200, pid=999),
        ],
        [mark("request", "tokens", 12, 150), mark("root", "early", 1, 5)],
    )
    sessions = load(write.spool, now_ns=LATER)
    assert [session.id for session in sessions] == [hex32("session")]
    assert shape(sessions[0]) == golden("""
        cirron.session   400.0 ms
        └─ request       100.0 ms  tokens 12
           └─ generate    80.0 ms
    """)
    (orphans,) = load(write.spool, session="_orph", now_ns=LATER)
    assert shape(orphans) == golden("""
        (orphan spans)              100.0 ms
        ├─ (marks without a span)             early 1
        └─ request                  100.0 ms
    """)


def test_counts_of_the_list_are_those_of_the_tree_without_resource_keys(tmp_path: Path) -> None:
    """Joining by parents alone counts what the tree shows, whatever the order of the files."""
    training(tmp_path, epochs=3, steps=7, session=None, writer=None)
    session = only(tmp_path)
    assert session.info.spans == len(list(walk([session.root]))) == 1 + 3 + 21 + 84
    assert session.info.marks == sum(len(node.marks) for node in walk([session.root]))
    assert session.info.bytes == sum(path.stat().st_size for path in (tmp_path / "spool").iterdir())


def test_a_worker_process_hangs_under_the_scope_it_was_started_from(tmp_path: Path) -> None:
    """Another writer, which knows no session, is joined by the parent's id."""
    write = Writer(tmp_path, session="r/session", writer="host-100-1")
    root = span("r/session", "cirron.session", None, 0, 400)
    write.batch(400, [span("r/epoch", "epoch", "r/session", 10, 300, index=0), root], open=[])
    worker = Writer(tmp_path, writer="host-200-1")
    rows = [span("x/fetch", "decode", "r/epoch", 12, 14, pid=200, attrs={"worker_id": 1})]
    worker.batch(90, rows, [mark("x/fetch", "images", 32, 13)])
    session = only(tmp_path)
    assert (session.info.spans, session.info.marks) == (3, 1)
    assert shape(session) == golden("""
        cirron.session   400.0 ms
        └─ epoch[0]      290.0 ms
           └─ decode       2.0 ms  images 32  pid 200  worker_id=1
    """)


def test_spans_whose_parents_never_came_hang_under_their_session(tmp_path: Path) -> None:
    """A lost parent loses nothing but the place, and the line says so."""
    write = Writer(tmp_path, session="session", writer="w-1-1")
    write.batch(
        100,
        [
            span("lost", "step", "never", 10, 20, index=4),
            span("session", "cirron.session", None, 0, 90),
        ],
        [mark("gone", "loss", 0.5, 50), mark("root", "early", 7, 1)],
    )
    assert shape(only(tmp_path)) == golden("""
        cirron.session               90.0 ms  early 7
        ├─ step[4]                   10.0 ms  parent not in the spool
        └─ (marks without a span)             loss 0.5
    """)


def test_a_session_whose_root_is_gone_is_still_a_session(tmp_path: Path) -> None:
    """After eviction the rows still name their session; it is shown from what is left."""
    write = Writer(tmp_path, session="session", writer="w-1-1")
    write.batch(100, [span("e", "epoch", "session", 10, 20, index=0)])
    session = only(tmp_path)
    assert session.info.rootless
    assert session.id == hex32("session")
    assert [node.span.name for node in walk([session.root])] == ["cirron.session", "epoch"]


def test_two_sessions_of_one_writer_keep_their_rows(tmp_path: Path) -> None:
    """``profile()`` twice in one process: rows without a parent go to the session of their time."""
    write = Writer(tmp_path, writer="w-1-1")
    write.batch(
        900,
        [
            span("t1", "thread", None, 10, 20),
            span("one", "cirron.session", None, 0, 100),
            span("t2", "thread", None, 510, 540),
            span("two", "cirron.session", None, 500, 600),
        ],
    )
    newest, oldest = load(write.spool, now_ns=LATER)
    assert (newest.id, oldest.id) == (hex32("two"), hex32("one"))
    assert [child.span.id for child in newest.root.children] == [hex32("t2")]
    assert [child.span.id for child in oldest.root.children] == [hex32("t1")]
    assert (newest.info.spans, oldest.info.spans) == (2, 2)


def test_window_roots_are_no_part_of_the_tree(tmp_path: Path) -> None:
    """Neither a batch's ``windows`` nor open rows marked as windows appear."""
    write = Writer(tmp_path, session="session", writer="w-1-1")
    window = span("w", "steps[0..399]", None, 5, None)
    data = msgspec.json.decode(
        write.batch(
            100, [], open=[span("session", "cirron.session", None, 0, None), window]
        ).read_bytes()
    )
    data["open"][1]["otel"] = {"window": True}
    path = write.spool.files()[0]
    path.write_bytes(msgspec.json.encode(data))
    write.batch(200, [span("a", "step", "session", 1, 2)], windows=[window])
    session = only(tmp_path)
    assert [node.span.name for node in walk([session.root])] == ["cirron.session", "step"]


def test_rings_of_parents_are_cut(tmp_path: Path) -> None:
    """Spans that name each other as parents, or themselves, are all shown, once."""
    write = Writer(tmp_path, session="session", writer="w-1-1")
    write.batch(
        100,
        [
            span("a", "a", "b", 10, 20),
            span("b", "b", "a", 11, 20),
            span("c", "c", "c", 12, 20),
            span("session", "cirron.session", None, 0, 90),
        ],
    )
    session = only(tmp_path)
    assert sorted(node.span.name for node in walk([session.root])) == [
        "a", "b", "c", "cirron.session",
    ]  # fmt: skip


def test_a_chain_of_100_000_spans_is_read_shaped_and_drawn(tmp_path: Path) -> None:
    """Nothing recurses; drawing stops at a depth that still is a tree and counts the rest."""
    write = Writer(tmp_path, session="session", writer="w-1-1")
    rows = [span("session", "cirron.session", None, 0, 1000)]
    rows += [span("0", "deep", "session", 1, 900)]
    rows += [span(str(i), "deep", str(i - 1), 1, 900) for i in range(1, 100_000)]
    write.batch(1000, rows)
    session = only(tmp_path)
    assert to_dict([session.root])["span_count"] == 100_001
    lines = shape(session).splitlines()
    assert len(lines) == 101
    assert lines[-1].endswith("+99,900 spans")


def test_100_000_siblings_collapse_to_a_few_lines(tmp_path: Path) -> None:
    """A session of 100,000 steps is five lines, and its notable steps are among them."""
    write = Writer(tmp_path, session="session", writer="w-1-1")
    per_batch = 20_000
    for begin in range(0, 100_000, per_batch):
        rows = [
            span(f"s{k}", "step", "session", k, k + 0.5, index=k)
            for k in range(begin, begin + per_batch)
        ]
        if begin == 40_000:
            rows[123].attrs = {"error": "ValueError: bad shape"}
        marks = [mark(f"s{k}", "loss", 1 / (1 + k), k) for k in range(begin, begin + per_batch)]
        write.batch(begin + per_batch, rows, marks)
    write.batch(200_000, [span("session", "cirron.session", None, 0, 100_000)], open=[])
    session = only(tmp_path)
    assert shape(session) == golden("""
        cirron.session           1 m 40 s
        ├─ step[0]               500.0 us  loss 1
        ├─ step[1]               500.0 us  loss 0.5
        ├─ … 99,996 more steps   500.0 us  mean  loss 0.3333 → 1e-05
        ├─ step[40123]           500.0 us  ERROR ValueError: bad shape  loss 2.492e-05
        └─ step[99999]           500.0 us  loss 1e-05
    """)


def test_max_spans_keeps_the_newest_and_the_sessions_children(tmp_path: Path) -> None:
    """Above the limit older spans are only counted; no epoch is lost, with its marks."""
    training(tmp_path, epochs=4, steps=10)
    (session,) = load(Writer(tmp_path).spool, max_spans=60, now_ns=LATER)
    kept = list(walk([session.root]))
    assert [child.span.index for child in session.root.children] == [0, 1, 2, 3]
    assert [len(child.marks) for child in session.root.children] == [1, 1, 1, 1]
    assert len(kept) + session.omitted == session.info.spans == 1 + 4 + 40 + 160
    assert len(kept) == 60 + 2  # two older epochs


def test_files_that_are_no_batches_are_passed_over_and_reported(tmp_path: Path) -> None:
    """Half a file, another schema and a foreign file: the rest of the spool is still read."""
    training(tmp_path, epochs=1, steps=1)
    directory = tmp_path / "spool"
    half = directory / f"{5:020d}-{'a' * 32}.json"
    half.write_bytes(next(directory.iterdir()).read_bytes()[:100])
    schema = directory / f"{6:020d}-{'b' * 32}.json"
    schema.write_text('{"schema_version": 2, "created_ns": 1}')
    (directory / "README.txt").write_text("not ours")
    (directory / f"{7:020d}-{'c' * 32}.json.tmp").write_text("{")
    seen: list[str] = []
    (session,) = load(
        Writer(tmp_path).spool, on_error=lambda path, exc: seen.append(f"{path.name[:20]} {exc}")
    )
    assert len(list(walk([session.root]))) == 7
    assert [line[:20] for line in seen] == [f"{6:020d}", f"{5:020d}"]
    assert "schema_version is 2" in seen[0]


def test_no_spool_is_no_session(tmp_path: Path) -> None:
    """A directory that does not exist holds no sessions and is not made."""
    assert load(Writer(tmp_path / "none").spool) == []
    assert not (tmp_path / "none").exists()


def test_sessions_are_found_by_the_beginning_of_their_id(tmp_path: Path) -> None:
    """A unique beginning names a session; none or several are an error that lists them."""
    for name in ("one", "two", "three"):
        write = Writer(tmp_path, session=name, writer=f"{name}-1-1")
        write.batch(100, [span(name, "cirron.session", None, 0, 50)], open=[])
    spool = Writer(tmp_path).spool
    (found,) = load(spool, session=hex32("two")[:6])
    assert found.id == hex32("two")
    with pytest.raises(NoSuchSessionError, match="no session begins with 'zz'"):
        load(spool, session="zz")
    with pytest.raises(NoSuchSessionError, match="3 sessions begin with ''"):
        load(spool, session="")
    assert len(load(spool, last=2)) == 2


def test_how_a_failed_span_says_why(tmp_path: Path) -> None:
    """The attribute, the status message or the exception event; the type once."""
    write = Writer(tmp_path, session="session", writer="w-1-1")
    path = write.batch(
        100,
        [
            span("a", "a", "session", 1, 2, attrs={"error": "KeyError: 'x'"}),
            span("b", "b", "session", 3, 4, attrs={"error": True}),
            span("c", "c", "session", 5, 6),
            span("d", "d", "session", 7, 8, attrs={"cirron.truncated": True}),
            span("session", "cirron.session", None, 0, 90),
        ],
    )
    data = msgspec.json.decode(path.read_bytes())
    attributes = {"exception.type": "OSError", "exception.message": "gone"}
    data["spans"][2]["otel"] = {
        "status": "error",
        "events": [{"name": "exception", "attributes": attributes}],
    }
    path.write_bytes(msgspec.json.encode(data))
    assert shape(only(tmp_path)) == golden("""
        cirron.session    90.0 ms
        ├─ a               1.0 ms  ERROR KeyError: 'x'
        ├─ b               1.0 ms  ERROR failed
        ├─ c               1.0 ms  ERROR OSError: gone
        └─ d               1.0 ms  closed at exit
    """)


def test_nothing_from_a_file_reaches_the_terminal_as_a_command(tmp_path: Path) -> None:
    """Escape sequences and line breaks in names, marks and attributes are spelled out."""
    write = Writer(tmp_path, session="session", writer="w-1-1")
    write.batch(
        100,
        [
            span(
                "a", "x\x1b[31m\n", "session", 1, 2, attrs={"k\t": "v\x07", "n": {"\x1b": "\x1b"}}
            ),
            span("session", "cirron.session", None, 0, 90),
        ],
        [mark("a", "m\r", "\x1b]0;", 1)],
    )
    shown = shape(only(tmp_path))
    assert shown.isprintable() is False  # the line breaks between our own lines
    assert all(line.isprintable() for line in shown.split("\n"))
    assert "x\\x1b[31m\\n" in shown
    assert len(shown.split("\n")) == 2


def test_to_dict_has_the_documented_shape(tmp_path: Path) -> None:
    """Times are ints, an open span has no length, a non-finite mark says which."""
    write = Writer(tmp_path, session="session", writer="w-1-1")
    write.batch(
        100,
        [span("a", "step", "session", 1, 2.5, index=7, cpu_ns=5, attrs={"lr": 0.1})],
        [mark("a", "loss", None, 1, value_nonfinite="nan"), mark("a", "ok", value=True, at=2)],
        open=[span("session", "cirron.session", None, 0, None)],
    )
    shaped = to_dict([only(tmp_path, now_ns=T0 + 200 * MS).root])
    assert shaped["span_count"] == 2
    root = shaped["roots"][0]
    assert (root["end_ns"], root["wall_us"]) == (None, None)
    assert root["children"] == [
        {
            "id": hex32("a"),
            "parent_id": hex32("session"),
            "name": "step",
            "index": 7,
            "start_ns": T0 + MS,
            "end_ns": T0 + 2_500_000,
            "wall_us": 1500.0,
            "cpu_ns": 5,
            "gpu_ns": None,
            "memory_peak_bytes": None,
            "attrs": {"lr": 0.1},
            "marks": [
                {"name": "loss", "value": None, "kind": "point", "value_nonfinite": "nan"},
                {"name": "ok", "value": True, "kind": "point"},
            ],
            "children": [],
        }
    ]


def test_select_by_name_keeps_what_is_below(tmp_path: Path) -> None:
    """A name or a label; ``last`` takes the newest of the matches."""
    training(tmp_path, epochs=2, steps=3)
    roots = [only(tmp_path).root]
    epochs = select(roots, name="epoch")
    assert [to_dict([node])["span_count"] for node in epochs] == [16, 16]
    assert [node.span.index for node in select(roots, name="step[1]")] == [1, 1]
    assert [node.span.index for node in select(roots, name="step", last=4)] == [2, 0, 1, 2]
    assert select(roots, name="nothing") == []
    assert select(roots) == roots


def test_select_last_keeps_relations_among_the_newest(tmp_path: Path) -> None:
    """Without a name the newest closed spans remain, as trees where they are related."""
    training(tmp_path, epochs=1, steps=2)
    roots = [only(tmp_path).root]
    found = select(roots, last=4)
    assert [[node.span.name for node in walk([root])] for root in found] == [
        ["cirron.session", "epoch", "step", "optimizer_step"]
    ]
    assert len(roots[0].children[0].children) == 2  # what was given is as it was
    assert [node.span.name for node in select(roots[0].children[0].children, last=1)] == ["step"]


def test_a_spool_that_is_cleared_while_it_is_read_is_no_error(tmp_path: Path) -> None:
    """Files that vanish between listing and reading are not there."""
    training(tmp_path, epochs=2, steps=2)
    spool = Writer(tmp_path).spool
    index = tree.Index(spool, now_ns=LATER)
    spool.clear()
    (session,) = tree.trees(index, index.sessions)
    assert [node.span.name for node in walk([session.root])] == ["cirron.session"]


@pytest.mark.parametrize(
    ("ns", "shown"),
    [
        (0, "0.0 us"),
        (1_234, "1.2 us"),
        (999_400, "999.4 us"),
        (999_600, "1.0 ms"),
        (48_100_000, "48.1 ms"),
        (12_400_000_000, "12.4 s"),
        (99_960_000_000, "1 m 39 s"),
        (3_599_900_000_000, "59 m 59 s"),
        (3_600_000_000_000, "1 h 00 m"),
        (90_000_000_000_000, "1 d 01 h"),
        (-5_000_000, "-5.0 ms"),
    ],
)
def test_durations(ns: int, shown: str) -> None:
    """Every length has a number and a unit that fit it."""
    assert duration(ns) == shown


def test_durations_are_parsed_with_every_unit() -> None:
    """The units of the command line, and nothing without a unit."""
    units = {"7ns": 7, "5us": 5_000, "5µs": 5_000, "5 ms": 5 * MS, "1.5s": 1_500 * MS}
    assert {given: parse_duration(given) for given in units} == units
    assert parse_duration("2m") == 120_000 * MS
    assert parse_duration("1h") == 3_600_000 * MS
    for wrong in ("5", "ms", "", "5 parsecs", "-1s", "infs", "nans"):
        with pytest.raises(ValueError, match="is not a duration"):
            parse_duration(wrong)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (True, "true"),
        (None, "null"),
        (2**70, str(2**70)),
        (0.91, "0.91"),
        (1e-05, "1e-05"),
        ("adam", "adam"),
        ("two words", '"two words"'),
        ("", '""'),
        ([1, "a"], "[1, a]"),
        ({"a": 1}, "{a: 1}"),
        ("x" * 100, "x" * 79 + "…"),
    ],
)
def test_values(value: object, shown: str) -> None:
    """Every value is one short readable piece."""
    assert text(value) == shown
