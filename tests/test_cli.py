"""The command ``cirron-otel``: what it prints, in which form, and with which exit status."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner, Result

from cirron_otel.cli.app import cli
from cirron_otel.recovery import WriterLock
from spool_by_hand import MS, T0, Writer, hex32, mark, span, training

COMMAND = [sys.executable, "-m", "cirron_otel.cli.main"]


class Done(NamedTuple):
    """What a command left behind."""

    status: int
    out: str
    err: str


def run(*arguments: str | Path, stdin: str = "", **environment: str) -> Done:
    """Run the command as a process of its own, without a terminal, in UTC."""
    env = {**os.environ, "TZ": "UTC", "PYTHONUTF8": "1", **environment}
    env.pop("CIRRON_OUTPUT_DIR", None)
    env.update({k: v for k, v in environment.items() if k == "CIRRON_OUTPUT_DIR"})
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin.encode(),
        capture_output=True,
        timeout=60,
        check=False,
        env=env,
    )
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode())


def invoke(*arguments: str | Path) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def on_terminal(*arguments: str | Path, **environment: str) -> str:
    """Run the command on a pseudo terminal and return all that it wrote there."""
    pid, fd = pty.fork()
    if pid == 0:  # pragma: no cover - another process
        os.environ.update({"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "50"})
        os.environ.update({"PYTHONUTF8": "1", "TZ": "UTC", **environment})
        os.execv(sys.executable, [*COMMAND, *map(str, arguments)])  # noqa: S606 - our command
    written = b""
    try:
        while chunk := os.read(fd, 65536):
            written += chunk
    except OSError:  # how Linux says that the other side is closed
        pass
    os.close(fd)
    os.waitpid(pid, 0)
    return written.decode().replace("\r\n", "\n")


def live(root: Path) -> WriterLock:
    """A session of this very process, which lives and holds its lock."""
    lock = WriterLock.acquire(root / "run", host=socket.gethostname(), pid=os.getpid(), start_ns=T0)
    if not lock.held:
        pytest.skip("this file system has no flock")
    write = Writer(root, session="live", writer=lock.name)
    write.batch(50, [], open=[span("live", "cirron.session", None, 0, None)])
    return lock


def test_view_prints_the_newest_session_as_a_tree(tmp_path: Path) -> None:
    """In a pipe: whole lines, no colours, the session's id at the end."""
    training(tmp_path, epochs=1, steps=3)
    done = run("traces", "view", "--spool", tmp_path)
    assert done.status == 0
    assert done.err == ""
    first, *rest = done.out.splitlines()[:4]
    assert re.split(" {2,}", first) == [
        "cirron.session", "165.0 ms", "run digits-cnn", "accuracy 0.93 (summary)",
        "framework=torch", "device=cpu",
    ]  # fmt: skip
    assert rest == [
        "└─ epoch[0]               150.0 ms  val_accuracy 0.85 (summary)  lr=0.01",
        "   ├─ step[0]              50.0 ms  loss 2.3",
        "   │  ├─ data_load          5.0 ms",
    ]
    assert done.out.splitlines()[-1] == (
        f"session {hex32('session')}, started 2026-11-29 12:00:00, 17 spans, 8 marks"
    )


def test_the_spool_may_be_named_in_every_way(tmp_path: Path) -> None:
    """The output directory, its spool folder, and the environment variable mean the same."""
    training(tmp_path / ".cirron", epochs=1, steps=1)
    root = tmp_path / ".cirron"
    expected = run("traces", "list", "--spool", root).out
    assert hex32("session")[:12] in expected
    assert run("traces", "list", "--spool", root / "spool").out == expected
    assert run("traces", "list", "--dir", tmp_path).out == expected
    assert run("spool", "inspect", "--spool", tmp_path).out == run(
        "spool", "inspect", "--dir", root
    ).out  # fmt: skip
    assert run("traces", "list", CIRRON_OUTPUT_DIR=str(root)).out == expected
    here = subprocess.run(
        [*COMMAND, "traces", "list"], cwd=tmp_path, capture_output=True, check=True, timeout=60,
        env={**{k: v for k, v in os.environ.items() if k != "CIRRON_OUTPUT_DIR"}, "TZ": "UTC",
             "PYTHONPATH": os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p)},
    )  # fmt: skip
    assert here.stdout.decode() == expected


@pytest.mark.parametrize("command", [("traces", "list"), ("runs",), ("spool", "inspect")])
def test_what_cannot_be_read_is_one_line(tmp_path: Path, command: tuple[str, ...]) -> None:
    """A link that leads round in a circle, as a directory without permission: no traceback."""
    (tmp_path / "spool").symlink_to("spool")
    done = run(*command, "--spool", tmp_path)
    assert done.status == 1
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1


def test_more_of_a_kind_is_said_in_words_that_there_are(tmp_path: Path) -> None:
    """Steps and batches have a plural; routes, and names that are one, stay as they are."""
    write = Writer(tmp_path)
    rows = [span("s", "cirron.session", None, 0, 900)]
    for kind in ("step", "batch", "GET /items", "embeddings"):
        rows += [span(f"{kind}{i}", kind, "s", 10 * i, 10 * i + 5) for i in range(9)]
    write.batch(1000, rows, open=[])
    shown = run("traces", "view", "--spool", tmp_path).out
    kinds = re.findall(r"more (.*?)  ", shown)
    assert sorted(kinds) == ["GET /items", "batches", "embeddings", "steps"]


def test_list_shows_every_kind_of_session(tmp_path: Path) -> None:
    """Done, failed, recovered, live and none: newest first, columns aligned."""
    lock = live(tmp_path)
    for key, at, fields in (
        ("failed", 100, {"attrs": {"error": "ValueError: x"}}),
        ("done", 200, {"attrs": {"cirron.run_id": "second"}, "rank": 1}),
    ):
        write = Writer(tmp_path, writer=f"{key}-1-1")
        write.batch(at + 90, [span(key, "cirron.session", None, at, at + 80, **fields)], open=[])
    write = Writer(tmp_path, session="dead", writer="dead-1-1")
    write.batch(400, [], open=[span("dead", "cirron.session", None, 300, None)])
    Writer(tmp_path).batch(500, [span("o", "request", None, 1, 2, pid=7)], [mark("o", "k", 1, 1)])
    done = run("traces", "list", "--spool", tmp_path)
    lock.release()
    lines = [line.split() for line in done.out.splitlines()]
    assert lines[0] == [
        "SESSION", "STARTED", "DURATION", "STATE", "RUN", "RANK", "SPANS", "MARKS", "SNAPSHOTS",
        "SIZE",
    ]  # fmt: skip
    states = [
        (line[0], re.search(r"done|failed|recovered|live|no session", " ".join(line)))
        for line in lines[1:]
    ]
    assert [(name, found and found[0]) for name, found in states] == [
        (hex32("dead")[:12], "recovered"),
        (hex32("done")[:12], "done"),
        (hex32("failed")[:12], "failed"),
        (hex32("live")[:12], "live"),
        ("_orphans", "no session"),
    ]
    assert "100.0 ms" in done.out.splitlines()[1]
    assert len({len(line) for line in done.out.splitlines()}) == 1


def test_list_json_has_the_documented_keys_and_ns_as_strings(tmp_path: Path) -> None:
    """Readers that turn numbers into doubles keep every digit."""
    training(tmp_path, epochs=1, steps=1)
    listed = json.loads(run("traces", "list", "--spool", tmp_path, "--json").out)
    assert listed["dir"] == str(tmp_path / "spool")
    (session,) = listed["sessions"]
    size = sum(path.stat().st_size for path in (tmp_path / "spool").iterdir())
    assert session == {
        "id": hex32("session"),
        "started_ns": str(T0),
        "ended_ns": str(T0 + 65 * MS),
        "live": False,
        "recovered": False,
        "spans": 7,
        "marks": 4,
        "snapshots": 0,
        "bytes": size,
        "sdk_version": "9.9.9",
        "run_id": "digits-cnn",
        "attempt": None,
        "ranks": [0],
        "writers": ["host-100-1"],
    }


def tree_of(done: Done) -> dict[str, Any]:
    """The tree that ``view --json`` printed."""
    assert done.status == 0, done.err
    tree: dict[str, Any] = json.loads(done.out)["tree"]
    return tree


def test_view_json_is_the_whole_tree(tmp_path: Path) -> None:
    """One object with the session's facts and nested nodes; nothing collapses."""
    training(tmp_path, epochs=2, steps=30)
    done = run("traces", "view", "--spool", tmp_path, "--json")
    document = json.loads(done.out)
    assert {key: document[key] for key in ("session_id", "sdk_version", "started_ns", "live")} == {
        "session_id": hex32("session"),
        "sdk_version": "9.9.9",
        "started_ns": str(T0),
        "live": False,
    }
    root = tree_of(done)
    assert [len(epoch["children"]) for epoch in root["children"]] == [30, 30]
    step = root["children"][0]["children"][1]
    assert [child["name"] for child in step["children"]] == [
        "data_load", "forward", "backward", "optimizer_step",
    ]  # fmt: skip
    assert step["start_ns"] == str(T0 + 60 * MS)
    assert step["duration_ns"] == str(50 * MS)
    assert step["index"] == 1
    assert (step["pid"], step["rank"], step["attrs"]) == (100, 0, {})
    assert step["marks"][0] == {
        "name": "loss",
        "value": 2.3 / 1.2,
        "kind": "point",
        "ts_ns": str(T0 + 105 * MS),
    }


def test_view_json_of_an_open_session_has_null_ends(tmp_path: Path) -> None:
    """A running session is live, and its end is not known."""
    lock = live(tmp_path)
    done = run("traces", "view", "--spool", tmp_path, "--json")
    lock.release()
    document = json.loads(done.out)
    assert (document["live"], document["ended_ns"]) == (True, None)
    assert document["tree"]["end_ns"] is None
    assert document["tree"]["duration_ns"] is None


def test_view_json_of_a_deep_chain_is_json(tmp_path: Path) -> None:
    """However deep the tree, it is written without recursion."""
    write = Writer(tmp_path, session="session", writer="w-1-1")
    rows = [span("session", "cirron.session", None, 0, 9), span("0", "deep", "session", 1, 2)]
    rows += [span(str(i), "deep", str(i - 1), 1, 2) for i in range(1, 5000)]
    write.batch(10, rows)
    done = run("traces", "view", "--spool", tmp_path, "--json")
    assert done.status == 0
    assert done.out.count('"children":[') == 5001
    assert done.out.endswith("]}" * 5001 + "}\n")


def test_view_of_several_sessions(tmp_path: Path) -> None:
    """``--last n`` shows n trees, newest first; in JSON they are a list."""
    for key, at in (("one", 0), ("two", 1000)):
        write = Writer(tmp_path, session=key, writer=f"{key}-1-1")
        write.batch(at + 90, [span(key, "cirron.session", None, at, at + 80)], open=[])
    done = run("traces", "view", "--spool", tmp_path, "--last", "2")
    ids = re.findall(r"^session (\w+)", done.out, re.MULTILINE)
    assert ids == [hex32("two"), hex32("one")]
    done = run("traces", "view", "--spool", tmp_path, "--last", "2", "--json")
    assert [document["session_id"] for document in json.loads(done.out)] == ids


def test_view_takes_a_session_by_the_beginning_of_its_id(tmp_path: Path) -> None:
    """As an argument or an option; what names none is an error with status 1."""
    training(tmp_path, epochs=1, steps=1)
    prefix = hex32("session")[:8]
    by_argument = run("traces", "view", prefix, "--spool", tmp_path)
    assert by_argument.status == 0
    assert run("traces", "view", "--session", prefix, "--spool", tmp_path) == by_argument
    none = run("traces", "view", "zz", "--spool", tmp_path)
    assert none == Done(1, "", "error: no session begins with 'zz'\n")
    both = run("traces", "view", prefix, "--last", "1", "--spool", tmp_path)
    assert both.status == 2


def test_view_name_keeps_the_way_down_and_what_is_below(tmp_path: Path) -> None:
    """A part of a name filters; the scopes above stay so that one sees where it was."""
    training(tmp_path, epochs=1, steps=1)
    done = run("traces", "view", "--spool", tmp_path, "--name", "optim")
    names = re.findall(r"[a-z_.]+(?=\[| {2})", "\n".join(done.out.splitlines()[:4]))
    assert [name for name in names if name in {"forward", "optimizer_step", "data_load"}] == [
        "optimizer_step"
    ]
    assert "step[0]" in done.out
    assert run("traces", "view", "--spool", tmp_path, "--name", "nowhere") == Done(
        1, "", "error: no span has 'nowhere' in its name\n"
    )


def test_view_min_wall_and_depth_filter_text_and_json(tmp_path: Path) -> None:
    """Short spans go; below the depth the spans are counted."""
    training(tmp_path, epochs=1, steps=2)
    root = tree_of(run("traces", "view", "--spool", tmp_path, "--min-wall", "10ms", "--json"))
    step = root["children"][0]["children"][0]
    assert [child["name"] for child in step["children"]] == ["forward", "backward"]
    root = tree_of(run("traces", "view", "--spool", tmp_path, "--depth", "1", "--json"))
    assert root["children"][0]["children"] == []
    assert root["children"][0]["collapsed_spans"] == 10
    wrong = run("traces", "view", "--spool", tmp_path, "--min-wall", "soon")
    assert wrong.status == 2
    assert "'soon' is not a duration; write for example 500us" in wrong.err


def test_view_all_and_overhead(tmp_path: Path) -> None:
    """``--all`` shows what collapses else, ``--overhead`` what the instrumentation cost."""
    training(tmp_path, epochs=1, steps=20)
    plain = run("traces", "view", "--spool", tmp_path).out
    assert "… 17 more steps" in plain
    assert "overhead" not in plain
    whole = run("traces", "view", "--spool", tmp_path, "--all").out
    assert len(re.findall(r"step\[\d+\]", whole)) == 20
    assert "cirron.overhead_ns 4.2 us" in run(
        "traces", "view", "--spool", tmp_path, "--overhead"
    ).out  # fmt: skip


def test_view_points_at_spans_of_no_session(tmp_path: Path) -> None:
    """They are not forgotten beside a session, and can be seen by name."""
    training(tmp_path, epochs=1, steps=1)
    Writer(tmp_path).batch(900, [span("o", "request", None, 800, 900, pid=7)])
    done = run("traces", "view", "--spool", tmp_path)
    assert done.out.splitlines()[-1] == (
        "1 span and 0 marks belong to no session: cirron-otel traces view _orphans"
    )
    done = run("traces", "view", "_orphans", "--spool", tmp_path)
    assert done.out.splitlines()[:2] == [
        "(orphan spans)   100.0 ms",
        "└─ request       100.0 ms",
    ]


def test_corrupt_files_are_warned_about_on_standard_error(tmp_path: Path) -> None:
    """The output stays clean, the first few are named, the others counted; the status is 0."""
    training(tmp_path, epochs=1, steps=1)
    clean = run("traces", "view", "--spool", tmp_path).out
    for i in range(7):
        (tmp_path / "spool" / f"{i:020d}-{'a' * 32}.json").write_text("{half")
    done = run("traces", "view", "--spool", tmp_path)
    assert (done.status, done.out) == (0, clean)
    lines = done.err.splitlines()
    assert len(lines) == 6
    assert lines[0].startswith(f"warning: skipped {6:020d}-{'a' * 32}.json: JSON is malformed")
    assert lines[5] == "warning: and 2 more files like this"


@pytest.mark.parametrize(
    "command", [("traces", "list"), ("traces", "view"), ("spool", "inspect"), ("spool", "clear")]
)
def test_without_a_spool_the_commands_say_how_to_get_one(
    tmp_path: Path, command: tuple[str, str]
) -> None:
    """Status 1, one line that names the place and the remedy; nothing is made."""
    option = "--dir" if command[0] == "spool" else "--spool"
    done = run(*command, option, tmp_path / "none")
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith(
        f"error: no spool in {tmp_path / 'none'}: there is no such directory"
    )
    assert "cirron_otel.profile()" in done.err
    assert f"{option} DIR" in done.err
    assert not (tmp_path / "none").exists()


def test_an_empty_spool_is_no_failure_of_list(tmp_path: Path) -> None:
    """There is nothing to list; to view there is nothing, which is an error."""
    (tmp_path / "spool").mkdir()
    assert run("traces", "list", "--spool", tmp_path).status == 0
    listed = run("traces", "list", "--spool", tmp_path, "--json")
    assert json.loads(listed.out)["sessions"] == []
    viewed = run("traces", "view", "--spool", tmp_path)
    assert (viewed.status, viewed.err) == (1, f"error: no sessions in {tmp_path}/spool yet\n")
    inspected = json.loads(run("spool", "inspect", "--dir", tmp_path, "--json").out)
    assert inspected == {
        "dir": str(tmp_path / "spool"),
        "files": 0,
        "totalBytes": 0,
        "oldest": None,
        "newest": None,
        "entries": [],
    }


def test_inspect_lists_the_files(tmp_path: Path) -> None:
    """Time, size and name, oldest first, with totals; the same in JSON."""
    training(tmp_path, epochs=2, steps=1)
    names = sorted(path.name for path in (tmp_path / "spool").iterdir())
    sizes = [(tmp_path / "spool" / name).stat().st_size for name in names]
    done = run("spool", "inspect", "--dir", tmp_path)
    lines = done.out.splitlines()
    assert [line.split()[-1] for line in lines[1:4]] == names
    assert lines[1].startswith("2026-11-29 12:00:00  ")
    assert lines[-1] == f"3 files, {sum(sizes) / 1000:.1f} kB in {tmp_path}/spool"
    document = json.loads(run("spool", "inspect", "--dir", tmp_path, "--json").out)
    assert (document["files"], document["totalBytes"]) == (3, sum(sizes))
    assert document["entries"][0] == {
        "name": names[0],
        "size": sizes[0],
        "createdNs": str(int(names[0][:20])),
        "iso": "2026-11-29T12:00:00.060000000Z",
    }
    assert document["oldest"]["name"] == names[0]
    assert document["newest"]["createdNs"] == str(int(names[2][:20]))


def test_clear_asks_first(tmp_path: Path) -> None:
    """Yes deletes, no and silence do not; ``--force`` does not ask."""
    training(tmp_path, epochs=1, steps=1)
    count = len(list((tmp_path / "spool").iterdir()))
    refused = run("spool", "clear", "--dir", tmp_path, stdin="n\n")
    assert refused.status == 1
    assert refused.err.endswith("[y/N] nothing was deleted\n")
    silent = run("spool", "clear", "--dir", tmp_path)
    assert silent.status == 1
    assert "use --force in a script" in silent.err
    assert len(list((tmp_path / "spool").iterdir())) == count
    agreed = run("spool", "clear", "--dir", tmp_path, stdin="y\n")
    assert agreed.status == 0
    assert agreed.out.startswith(f"deleted {count} files, ")
    assert list((tmp_path / "spool").iterdir()) == []
    training(tmp_path, epochs=1, steps=1)
    assert run("spool", "clear", "--dir", tmp_path, "--force").status == 0
    assert list((tmp_path / "spool").iterdir()) == []


def test_clear_refuses_while_somebody_writes(tmp_path: Path) -> None:
    """A held lock is in the way even of a yes; ``--force`` goes past it."""
    lock = live(tmp_path)
    refused = run("spool", "clear", "--dir", tmp_path, stdin="y\n")
    assert refused.status == 1
    assert f"error: {lock.name} is writing to" in refused.err
    assert len(list((tmp_path / "spool").iterdir())) == 1
    assert f"being written by {lock.name}" in run("spool", "inspect", "--dir", tmp_path).out
    assert run("spool", "clear", "--dir", tmp_path, "--force").status == 0
    lock.release()
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    """``| head -1`` of a long output ends quietly."""
    training(tmp_path, epochs=5, steps=400)
    for extra in ("--all", "--json"):
        command = " ".join([*COMMAND, "traces view --spool", str(tmp_path), extra, "| head -1"])
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            capture_output=True,
            timeout=60,
            check=True,
            env={**os.environ, "PYTHONUTF8": "1"},
        )
        assert done.stderr == b""
        assert len(done.stdout.splitlines()) == 1


def test_an_interrupt_ends_with_130(tmp_path: Path) -> None:
    """Ctrl-C at the question: status 130, no traceback, nothing deleted."""
    training(tmp_path, epochs=1, steps=1)
    with subprocess.Popen(
        [*COMMAND, "spool", "clear", "--dir", str(tmp_path)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stderr is not None
        asked = b""
        while not asked.endswith(b"[y/N] "):
            asked += process.stderr.read(1)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(timeout=30) == 130
    assert b"Traceback" not in rest
    assert len(list((tmp_path / "spool").iterdir())) == 2


def test_wrong_usage_ends_with_2(tmp_path: Path) -> None:
    """Unknown commands and options, and values out of range."""
    assert run("nothing").status == 2
    assert run("traces", "view", "--nothing").status == 2
    assert run("traces", "view", "--last", "0", "--spool", tmp_path).status == 2
    assert run("traces", "view", "--depth", "-1", "--spool", tmp_path).status == 2


def test_help_and_version_end_with_0() -> None:
    """Both work without any spool."""
    assert run("--version").out.startswith("cirron-otel, version ")
    for command in ((), ("traces",), ("spool",), ("traces", "view"), ("spool", "clear")):
        done = invoke(*command, "--help")
        assert done.exit_code == 0
        assert done.output.startswith("Usage:")


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_the_extra_it_says_what_to_install(tmp_path: Path, missing: str) -> None:
    """One line and status 2, in an interpreter that finds no such package."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        f"sys.modules[{missing!r}] = None\n"
        "import importlib.util as util\n"
        "real = util.find_spec\n"
        f"util.find_spec = lambda name, *a: None if name == {missing!r} else real(name, *a)\n"
        "from cirron_otel.cli.main import main\n"
        "sys.exit(main(['traces', 'list']))\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.decode() == "pip install 'cirron-otel[cli]'\n"


def test_a_terminal_gets_colours_and_lines_that_fit(tmp_path: Path) -> None:
    """Escape sequences, and no line of the tree wider than the terminal."""
    training(tmp_path, epochs=1, steps=8)
    shown = on_terminal("traces", "view", "--spool", tmp_path, COLUMNS="50")
    assert "\x1b[1mcirron.session\x1b[0m" in shown
    bare = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    tree = bare.split("\n\n")[0].splitlines()
    assert max(len(line) for line in tree) <= 50
    assert tree[0].endswith("…")
    assert f"session {hex32('session')}, started 2026-11-29 12:00:00" in bare


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [(("--no-color",), {}), ((), {"NO_COLOR": "1"}), ((), {"TERM": "dumb"})],
)
def test_colours_can_be_switched_off(
    tmp_path: Path, arguments: tuple[str, ...], environment: dict[str, str]
) -> None:
    """By option, by ``NO_COLOR`` and by a terminal that has none: not one escape sequence."""
    training(tmp_path, epochs=1, steps=1)
    shown = on_terminal("traces", "view", "--spool", tmp_path, *arguments, **environment)
    assert "cirron.session" in shown
    assert "\x1b" not in shown


def test_a_terminal_shows_the_ends_of_a_long_list_of_files(tmp_path: Path) -> None:
    """The oldest few and the newest; ``--all`` and a pipe show every file."""
    write = Writer(tmp_path)
    for at in range(50):
        write.batch(at, [])
    shown = on_terminal("spool", "inspect", "--dir", tmp_path, NO_COLOR="1")
    assert shown.count(".json") == 20
    assert "... 30 more (--all)" in shown
    assert on_terminal("spool", "inspect", "--dir", tmp_path, "--all").count(".json") == 50
    assert run("spool", "inspect", "--dir", tmp_path).out.count(".json") == 50


def test_an_ascii_terminal_gets_an_ascii_tree(tmp_path: Path) -> None:
    """Where the encoding has no box characters the tree is drawn without them."""
    training(tmp_path, epochs=1, steps=20)
    done = run(
        "traces", "view", "--spool", tmp_path, PYTHONUTF8="0", PYTHONIOENCODING="ascii"
    )  # fmt: skip
    assert done.status == 0
    assert done.out.isascii()
    assert "`- epoch[0]" in done.out
    assert "... 17 more steps" in done.out


def test_a_spool_of_100_000_spans_is_listed_and_viewed(tmp_path: Path) -> None:
    """Large runs are counted right and drawn in a few lines."""
    write = Writer(tmp_path, session="session", writer="w-1-1")
    for begin in range(0, 100_000, 25_000):
        rows = [
            span(f"s{k}", "step", "session", k, k + 1, index=k)
            for k in range(begin, begin + 25_000)
        ]
        write.batch(begin + 25_000, rows)
    write.batch(200_000, [span("session", "cirron.session", None, 0, 100_000)], open=[])
    assert "100,001" in run("traces", "list", "--spool", tmp_path).out
    done = run("traces", "view", "--spool", tmp_path)
    assert "… 99,997 more steps" in done.out
    assert len(done.out.splitlines()) == 7


def test_reading_starts_neither_torch_nor_opentelemetry(tmp_path: Path) -> None:
    """The command stays quick: it loads nothing heavy, and rich only for a terminal."""
    training(tmp_path, epochs=1, steps=1)
    program = (
        "import sys\n"
        "from cirron_otel.cli.main import main\n"
        f"status = main(['traces', 'view', '--spool', {str(tmp_path)!r}])\n"
        "heavy = {'torch', 'numpy', 'opentelemetry.sdk', 'rich', 'yaml'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=60, check=False
    )
    assert done.stderr == b""
    assert done.returncode == 0
