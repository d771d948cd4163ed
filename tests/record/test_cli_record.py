"""``cirron-otel record``: what the commands print, their statuses, and that nothing breaks them."""

from __future__ import annotations

import json
import os
import pty
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cirron_otel.cli.app import cli, run
from cirron_otel.cli.record import record as group
from cirron_otel.training_record.checking.verify import verify
from cirron_otel.training_record.signing import PASSPHRASE_VARIABLE, fingerprint, load_public_key
from helpers import RunProgram
from journal_records import BEGIN
from record.tampering import RECORDS, TAMPERED

COMMAND = [sys.executable, "-m", "cirron_otel.cli.main", "record"]
SIGNER = RECORDS / "signed" / "signer.pub.pem"
#: Each command that reads a record, with what it needs beside it.
READERS: dict[str, list[str]] = {
    "verify": [],
    "show": [],
    "show --json": ["--json"],
    "report": [],
    "report --format json": ["--format", "json"],
    "report --format markdown": ["--format", "markdown"],
    "diff": [str(RECORDS / "healthy")],
    "recover": [],
    "seal": [],
}


def start(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a process of its own, without a terminal."""
    return subprocess.run(
        [*COMMAND, *map(str, words)], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=60, check=False, env={**os.environ, "PYTHONUTF8": "1", **environment},
    )  # fmt: skip


def call(*words: object, **environment: str | None) -> tuple[int, str, str]:
    """Run a command in this process: its status and what it wrote; an exception comes through."""
    done = CliRunner().invoke(cli, ["record", *map(str, words)], env=environment)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def on_terminal(columns: int, *words: object, typed: Sequence[str] = (), **environment: str) -> str:
    """Run a command on a pseudo terminal and return all that it wrote there.

    ``typed`` are the answers to what it asks, each given when a question stands there.
    """
    pid, fd = pty.fork()
    if pid == 0:  # pragma: no cover - another process
        os.environ.pop("NO_COLOR", None)
        os.environ.update({"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "50"})
        os.environ.update({"PYTHONUTF8": "1", **environment})
        os.execv(sys.executable, [*COMMAND, *map(str, words)])  # noqa: S606
    written = b""
    try:
        answers = list(typed)
        while chunk := os.read(fd, 65536):
            written += chunk
            if answers and written.endswith(b": "):
                os.write(fd, answers.pop(0).encode() + b"\n")
    except OSError:  # the other side has ended
        pass
    os.close(fd)
    os.waitpid(pid, 0)
    return written.decode().replace("\r\n", "\n")


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """A pair of keys, made by the command."""
    private, public = tmp_path / "signing.pem", tmp_path / "signing.pub.pem"
    status, out, _ = call("keygen", private, public)
    assert status == 0
    assert "fingerprint" in out
    return private, public


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of a finished record that is not sealed."""
    return Path(shutil.copytree(RECORDS / "healthy", tmp_path / "run"))


# --- verify ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", sorted(path.parent.name for path in RECORDS.glob("*/expected_verify.json"))
)
def test_verify_ends_as_the_existing_verifier_does(case: str) -> None:
    """The status is that of the existing verifier, and there is a line with a mark per check."""
    expected = json.loads((RECORDS / case / "expected_verify.json").read_text())
    found = next(iter((RECORDS / case).glob("*.diary.jsonl")), RECORDS / case)
    key = ["--key", SIGNER] if case == "signed" else []
    strict = ["--strict"] if expected["strict"] else []
    status, out, err = call("verify", found, *key, *strict)
    assert status == (0 if expected["passed"] else 1)
    assert err == ""
    checks = verify(found, key=SIGNER if key else None).checks
    lines = [line for line in out.splitlines() if line.startswith("  ")]
    assert [line[4 : 4 + len(check.label)] for line, check in zip(lines, checks, strict=True)] == [
        check.label for check in checks
    ]
    assert out.splitlines()[-1].startswith("VERIFIED." if expected["passed"] else "NOT VERIFIED")


@pytest.mark.parametrize("crime", sorted(path.name for path in TAMPERED.iterdir()))
def test_verify_of_a_changed_record_agrees_with_itself(crime: str) -> None:
    """Status, JSON and last sentence say the same about every changed record."""
    status, out, _ = call("verify", TAMPERED / crime, "--json")
    told = json.loads(out)
    assert status == (0 if told["passed"] else 1)
    assert told["verdict"].startswith("VERIFIED." if told["passed"] else "NOT VERIFIED")
    failed = [check for check in told["checks"] if check["status"] == "fail"]
    assert told["ok"] is not bool(failed)


def test_each_verdict_says_what_it_rests_on(copy: Path, keys: tuple[Path, Path]) -> None:
    """Not sealed, sealed, signed and checked are four sentences; --strict names what is missing."""
    private, public = keys
    assert "neither sealed nor signed" in call("verify", copy)[1]
    status, out, _ = call("verify", copy, "--strict")
    assert status == 1
    assert "--strict wants all nine" in out
    assert call("seal", copy)[0] == 0
    assert "It is not signed" in call("verify", copy)[1]
    assert call("sign", copy, "--key", private)[0] == 0
    assert "by whom was not checked" in call("verify", copy)[1]
    status, out, _ = call("verify", copy, "--strict", "--key", public)
    assert status == 0
    assert "the owner of this key" in out


def test_verify_tells_a_crash_from_a_change() -> None:
    """A record without an end may be a crash, one with an event behind its end is none."""
    assert "crash" in call("verify", RECORDS / "kill9")[1].splitlines()[-1]
    assert "crash" not in call("verify", RECORDS / "sink_error_after_run_end")[1].splitlines()[-1]


def test_verify_with_anchors(tmp_path: Path, run_program: RunProgram) -> None:
    """A record fits the anchors in the spool of its run, and not once its end is cut off."""
    made = run_program(
        "import cirron_otel as ci\n"
        + BEGIN
        + "from cirron_otel.record_anchors import open_journal\n"
        "ci.profile(frameworks=[])\n"
        "journal = open_journal('rec', run_start=START)\n"
        "for step in range(3):\n"
        "    journal.check(step, 0.5, {'a': 1.0}, {})\n"
        "journal.close()\n"
        "ci.shutdown()\n"
    )
    assert made.stderr == ""
    spool = made.output_dir.absolute()
    place = spool.parent
    status, out, _ = call("verify", place / "rec", "--anchors", spool)
    assert (status, "It fits its anchors." in out) == (0, True), out
    diary = place / "rec" / "diary.jsonl"
    diary.write_bytes(b"".join(diary.read_bytes().splitlines(keepends=True)[:-1]))
    status, out, _ = call("verify", place / "rec", "--anchors", spool)
    assert status == 1
    assert "anchors" in out.splitlines()[-1]
    assert call("verify", RECORDS / "healthy", "--anchors", tmp_path)[0] == 2


# --- keys, seals, recovery ------------------------------------------------------------------------


def test_keygen_says_what_it_made_as_json(tmp_path: Path) -> None:
    """Where the keys are, and the fingerprint that a seal will name."""
    private, public = tmp_path / "k", tmp_path / "k.pub"
    status, out, _ = call("keygen", private, public, "--json")
    assert (status, json.loads(out)) == (
        0,
        {
            "private_key": str(private),
            "public_key": str(public),
            "public_key_sha256": fingerprint(load_public_key(public)),
            "encrypted": False,
        },
    )


def test_sign_takes_a_key_from_anywhere(copy: Path, keys: tuple[Path, Path]) -> None:
    """From a file, the environment, and a command; each signature verifies."""
    private, public = keys
    command = (
        f'{sys.executable} -c "import sys; from pathlib import Path; '
        "from cirron_otel.training_record.signing import load_private_key; "
        f"sys.stdout.buffer.write(load_private_key('{private}').sign(sys.stdin.buffer.read()))\""
    )
    for words, environment in (
        (["--key", private], {}),
        (["--key-env", "MY_KEY"], {"MY_KEY": private.read_text()}),
        (["--key-command", command, "--public-key", public], {}),
    ):
        status, out, err = call("sign", copy, *words, **environment)
        assert (status, err) == (0, ""), words
        assert out.startswith("signed ")
        assert call("verify", copy, "--strict", "--key", public)[0] == 0


def test_an_encrypted_key_needs_its_passphrase(copy: Path, tmp_path: Path) -> None:
    """Without one sign says so and writes nothing; with a wrong one it says that."""
    private, public = tmp_path / "k", tmp_path / "k.pub"
    words = ["keygen", private, public, "--encrypt", "--passphrase-env", "PASS"]
    assert call(*words, PASS="abc")[0] == 0  # noqa: S106
    assert "ENCRYPTED" in private.read_text()
    status, _, err = call("sign", copy, "--key", private)
    assert (status, "is encrypted" in err) == (2, True)
    status, _, err = call("sign", copy, "--key", private, "--passphrase-env", "PASS", PASS="x")  # noqa: S106
    assert (status, "passphrase is wrong" in err) == (2, True)
    status, _, err = call("sign", copy, "--key", private, "--passphrase-env", "PASS")
    assert (status, "PASS is not set" in err) == (2, True)
    assert not (copy / "record.json").exists()
    words = ["sign", copy, "--key", private]
    status, _, err = call(*words, **{PASSPHRASE_VARIABLE: "abc"})
    assert (status, err) == (0, "")


def test_a_passphrase_is_asked_for_on_a_terminal(copy: Path, tmp_path: Path) -> None:
    """Twice when a key is made, once when it signs; it is never shown."""
    private, public = tmp_path / "k", tmp_path / "k.pub"
    shown = on_terminal(80, "keygen", private, public, "--encrypt", typed=["hush", "hush"])
    assert "fingerprint" in shown
    assert "ENCRYPTED" in private.read_text()
    shown += on_terminal(80, "sign", copy, "--key", private, typed=["hush"])
    assert "signed" in shown
    assert "hush" not in shown
    assert call("verify", copy, "--strict", "--key", public)[0] == 0


@pytest.mark.parametrize(
    "words",
    [
        ["verify"],
        ["verify", "--nonsense", "x"],
        ["verify", "/nowhere/at/all"],
        ["verify", RECORDS / "signed", "--key", "/nowhere"],
        ["verify", RECORDS / "signed", "--key", RECORDS / "vectors.json"],
        ["verify", RECORDS / "healthy", "--anchors", "/nowhere"],
        ["verify", RECORDS / "healthy", "--anchors", "http://127.0.0.1:9/anchors"],
        ["sign", RECORDS / "kill9", "--key", "/nowhere"],
        ["sign", RECORDS / "healthy"],
        ["sign", RECORDS / "healthy", "--key", "a", "--key-env", "b"],
        ["sign", RECORDS / "healthy", "--key-command", "x"],
        ["sign", RECORDS / "healthy", "--key-command", "'", "--public-key", SIGNER],
        ["sign", RECORDS / "healthy", "--key-command", "/nowhere", "--public-key", SIGNER],
        ["sign", RECORDS / "healthy", "--key-env", "NO_SUCH_VARIABLE"],
        ["seal", RECORDS / "kill9"],
        ["keygen", "/nowhere/a", "/nowhere/b"],
        ["keygen", RECORDS / "vectors.json", "/nowhere/b"],
        ["keygen", "a", "b", "--encrypt"],
        ["recover", RECORDS / "vectors.json"],
        ["diff", RECORDS / "healthy", "/nowhere"],
        ["diff", RECORDS / "healthy", RECORDS / "healthy", "--tolerance", "nan"],
        ["diff", RECORDS / "healthy", RECORDS / "healthy", "--fail-on", "x"],
        ["report", "/nowhere"],
        ["report", RECORDS / "healthy", "-o", "/nowhere/x.html"],
        ["report", RECORDS / "healthy", "-o", RECORDS],
        ["report", RECORDS / "healthy", "-o", RECORDS / "healthy" / "diary.jsonl"],
        ["report", RECORDS / "healthy", "--gpu-hour-cost", "nan"],
        ["show", "/nowhere"],
        ["show", "a" * 5000],
        ["show", RECORDS / "healthy", "--events", "nonsense"],
        ["nonsense"],
    ],
    ids=lambda words: "-".join(str(word).rpartition("/")[2][:20] for word in words),
)
def test_what_cannot_be_done_is_status_2_and_says_why(
    words: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    """A line on standard error, nothing on standard output, and status 2 (R-W14)."""
    assert run(["record", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].lower().startswith("error: ")
    assert len(err.splitlines()[-1]) > 15


def test_recover_then_sign(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    """What a killed writer left is ended once, then signed; a record that ended is refused."""
    place = Path(shutil.copytree(RECORDS / "kill9", tmp_path / "killed"))
    status, out, _ = call("recover", place)
    assert (status, out.startswith("recovered ")) == (0, True)
    status, out, _ = call("recover", place, "--json")
    assert (status, json.loads(out)["changed"]) == (0, False)
    assert call("sign", place, "--key", keys[0])[0] == 0
    assert call("verify", place, "--strict", "--key", keys[1])[0] == 0
    status, _, err = call("recover", shutil.copytree(RECORDS / "healthy", tmp_path / "ended"))
    assert (status, "ended in order" in err) == (2, True)


# --- diff, report, show ---------------------------------------------------------------------------


def test_diff_is_a_gate() -> None:
    """Worse fails one gate, different the other, and neither the status without one (R-W15)."""
    good, worse = RECORDS / "healthy", RECORDS / "lesion_watch"
    assert call("diff", good, worse)[0] == 0
    status, out, _ = call("diff", good, worse, "--fail-on", "regression")
    assert (status, "FAILED" in out) == (1, True)
    status, out, _ = call("diff", good, worse, "--fail-on", "regression", "--json")
    assert (status, json.loads(out)["failed"]) == (1, True)
    assert call("diff", worse, good, "--fail-on", "regression")[0] == 0
    assert call("diff", worse, good, "--fail-on", "difference")[0] == 1
    assert call("diff", good, good, "--fail-on", "difference")[0] == 0


@pytest.mark.parametrize("form", ["html", "summary", "markdown", "summary-markdown", "json"])
def test_reports_go_where_they_are_told(form: str, tmp_path: Path) -> None:
    """A file gets what standard output gets, whole, and nothing is left beside it."""
    status, out, err = call("report", RECORDS / "lesion_watch", "--format", form)
    assert (status, err) == (0, "")
    target = tmp_path / "there"
    target.write_text("old")
    words = ["report", RECORDS / "lesion_watch", "--format", form, "-o", target]
    assert call(*words)[0] == 0
    assert target.read_text() == out
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    if form == "json":
        assert json.loads(out)["name"] == "lesion_watch"


def test_a_pipe_without_a_reader_is_not_waited_for(tmp_path: Path) -> None:
    """Writing a report into such a pipe fails at once."""
    os.mkfifo(tmp_path / "pipe")
    status, _, err = call("report", RECORDS / "healthy", "-o", tmp_path / "pipe")
    assert (status, "cannot write" in err) == (2, True)


def test_show_filters() -> None:
    """By kind, severity, layer and step; the JSON lines are the lines of the diary."""
    place = RECORDS / "lesion_watch"
    lines = [json.loads(line) for line in (place / "diary.jsonl").read_text().splitlines()]
    shown = [json.loads(line) for line in call("show", place, "--json")[1].splitlines()]
    assert shown == lines
    words = ["--json", "--events", "alarm,certificate"]
    assert [json.loads(line)["event"] for line in call("show", place, *words)[1].splitlines()] == [
        line["event"] for line in lines if line["event"] in {"alarm", "certificate"}
    ]
    for words, want in (
        (["--severity", "proof"], [x for x in lines if x.get("severity") == "proof"]),
        (["--layer", "3"], [x for x in lines if x.get("layer") == "3"]),
        (["--since-step", "65"], [x for x in lines if x.get("step", -1) >= 65]),
    ):
        found = [json.loads(x) for x in call("show", place, "--json", *words)[1].splitlines()]
        assert found == want
        assert want
        # Four lines of heading, an empty one, the heads of the columns.
        assert len(call("show", place, *words)[1].splitlines()) == 6 + len(want)


# --- terminals and pipes --------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [30, 60, 100, 200])
def test_terminals_of_any_width(columns: int) -> None:
    """No line is longer than the terminal, but for words that are; colours come and end."""
    shown = on_terminal(columns, "verify", TAMPERED / "cut_end_of_a_sealed_record")
    assert "\033[" in shown
    plain = on_terminal(columns, "verify", TAMPERED / "cut_end_of_a_sealed_record", NO_COLOR="1")
    assert "\033" not in plain
    lines = plain.splitlines()
    assert all(len(line) <= columns or " " not in line.strip() for line in lines), plain
    shown = on_terminal(columns, "show", RECORDS / "lesion_watch", NO_COLOR="1")
    assert max(map(len, shown.splitlines())) <= columns


def test_nothing_but_ascii_where_nothing_else_goes() -> None:
    """With an ASCII output the marks are ASCII, too."""
    done = start("verify", RECORDS / "lesion_watch", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "\\u" not in done.stdout


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["verify", RECORDS / "healthy"], 0),
        (["verify", RECORDS / "kill9"], 1),
        (["show", RECORDS / "lesion_repair"], 0),
        (["report", RECORDS / "healthy"], 0),
        (["diff", RECORDS / "healthy", RECORDS / "lesion_watch", "--fail-on", "regression"], 1),
    ],
    ids=["good", "bad", "show", "report", "diff"],
)
def test_a_reader_that_leaves_changes_no_verdict(words: list[object], status: int) -> None:
    """With the output's other end closed, a command is quiet and its status is what it was."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*COMMAND, *map(str, words)], stdin=subprocess.DEVNULL, stdout=write,
        stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (status, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", ["verify", "show", "report"])
def test_a_full_disk_is_said(command: str) -> None:
    """Output that cannot be written is status 2 and a line, no traceback."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, command, str(RECORDS / "healthy")], stdout=full, stderr=subprocess.PIPE,
            text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "error: cannot write the output: No space left on device\n"


def test_no_output_at_all() -> None:
    """With standard output closed the status still says how the record is."""
    words = " ".join([*COMMAND, "verify", str(RECORDS / "kill9")])
    done = subprocess.run(
        ["/bin/sh", "-c", f"{words} >&-"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")


# --- any input at all -----------------------------------------------------------------------------


def _hostile(  # noqa: C901 - a branch a thing
    kind: str, place: Path
) -> Path:
    """A run directory whose diary is no file, or other things where a run should be."""
    place.mkdir()
    diary = place / "diary.jsonl"
    (place / "metrics.jsonl").touch()
    if kind == "pipe":
        os.mkfifo(diary)
    elif kind == "directory":
        diary.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(diary))
    elif kind == "dangling link":
        diary.symlink_to(place / "nothing")
    elif kind == "link to itself":
        diary.symlink_to(diary)
    elif kind == "empty":
        diary.touch()
    elif kind == "not readable":
        shutil.copy(RECORDS / "healthy" / "diary.jsonl", diary)
        diary.chmod(0)
    elif kind == "not to be entered":
        place.chmod(0)
    elif kind == "metrics pipe":
        shutil.copy(RECORDS / "healthy" / "diary.jsonl", diary)
        (place / "metrics.jsonl").unlink()
        os.mkfifo(place / "metrics.jsonl")
    elif kind == "null device":
        return Path("/dev/null")
    elif kind == "name with bytes":
        shutil.copy(RECORDS / "healthy" / "diary.jsonl", diary)
        return place.rename(place.with_name("caf\udce9\x1b[31m"))
    return place


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "kind",
    [
        "pipe", "directory", "socket", "dangling link", "link to itself", "empty", "not readable",
        "not to be entered", "metrics pipe", "null device", "name with bytes",
    ],
)  # fmt: skip
def test_things_that_are_no_record(kind: str, reader: str, tmp_path: Path) -> None:
    """Whatever lies there, a command answers with a status and neither waits nor breaks."""
    place = _hostile(kind, tmp_path / "r")
    try:
        status, out, err = call(reader.split(maxsplit=1)[0], place, *READERS[reader])
    finally:
        if kind == "not to be entered":
            place.chmod(0o700)
    assert status in {0, 1, 2}
    assert (status == 2) == (err != ""), (status, err)
    assert "\x1b" not in out.replace("\\x1b", "") or reader.endswith("--json")


@given(
    diary=st.one_of(
        st.binary(max_size=400),
        st.lists(
            st.dictionaries(
                st.sampled_from(
                    ["seq", "time", "event", "prev", "hash", "step", "layer", "config", "counts"]
                ),
                st.one_of(
                    st.none(),
                    st.booleans(),
                    st.integers(),
                    st.floats(),
                    st.text(max_size=8),
                    st.sampled_from(["run_start", "run_end", "alarm", "repair", "manifest"]),
                    st.lists(st.integers(), max_size=3),
                    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
                ),
            ),
            max_size=6,
        ).map(lambda lines: "\n".join(map(json.dumps, lines)).encode()),
    ),
    metrics=st.binary(max_size=100),
    seal=st.one_of(st.none(), st.binary(max_size=100)),
    reader=st.sampled_from(sorted(READERS)),
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_bytes(
    tmp_path: Path, diary: bytes, metrics: bytes, seal: bytes | None, reader: str
) -> None:
    """Random files, and random events, never break a command."""
    place = tmp_path / "r"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    (place / "diary.jsonl").write_bytes(diary)
    (place / "metrics.jsonl").write_bytes(metrics)
    if seal is not None:
        (place / "record.json").write_bytes(seal)
    status, _, err = call(reader.split(maxsplit=1)[0], place, *READERS[reader])
    assert status in {0, 1, 2}
    assert (status == 2) == (err != "")


# --- what is loaded -------------------------------------------------------------------------------


def test_the_lists_of_commands_say_what_the_commands_say() -> None:
    """Each short help in a list is that of the command itself."""
    for listed in (cli, group):
        assert listed.lazy
        context = listed.make_context("x", [], resilient_parsing=True)
        for name, lazy in listed.lazy.items():
            command = listed.get_command(context, name)
            assert command is not None
            assert command.name == name
            assert (command.help or "").startswith(lazy.short_help.removesuffix("."))


@pytest.mark.parametrize(
    ("words", "not_loaded"),
    [
        (["--help"], {"msgspec", "rich", "cryptography", "opentelemetry", "torch", "json"}),
        (
            ["verify", str(RECORDS / "healthy")],
            {"rich", "cryptography", "opentelemetry", "torch", "urllib3", "subprocess"},
        ),
        (["show", str(RECORDS / "healthy")], {"rich", "cryptography", "opentelemetry", "torch"}),
    ],
    ids=["help", "verify", "show"],
)
def test_a_command_loads_what_it_needs(words: list[str], not_loaded: set[str]) -> None:
    """Starting is quick because the heavy libraries stay away (R-W13)."""
    program = (
        "import sys\n"
        "from cirron_otel.cli.main import main\n"
        f"assert main({['record', *words]!r}) == 0\n"
        "print(*sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert not not_loaded & set(done.stderr.split())


@pytest.mark.parametrize("depth", [40, 400, 900, *range(960, 1000, 8), 100_000])
def test_any_depth(depth: int, tmp_path: Path) -> None:
    """A value nested as deep as readers can just go, or deeper, never breaks a command."""
    place = Path(shutil.copytree(RECORDS / "lesion_watch", tmp_path / "r"))
    first, rest = (place / "diary.jsonl").read_text().split("\n", 1)
    deep = first.replace('"config": {', '"config": {"z": ' + "[" * depth + "]" * depth + ", ")
    assert deep != first
    for reader, more in READERS.items():
        (place / "diary.jsonl").write_text(f"{deep}\n{rest}")
        status, _, err = call(reader.split()[0], place, *more)
        assert status in {0, 1, 2}
        assert (status == 2) == (err != "")
