"""Cursors: what is settled stays settled, and nothing wrong with them loses a batch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cirron_otel.cursors import Cursor, CursorReader, Delivered
from cirron_otel.errors import SpoolError
from helpers import StartProgram

NAMES = [f"{1_795_953_600_000_000_000 + i:020d}-{i:032x}.json" for i in range(20_000)]


def taken(root: Path, name: str = "platform") -> Cursor:
    """A cursor that is held."""
    cursor = Cursor(root, name)
    assert cursor.take()
    return cursor


def test_what_is_settled_is_known_to_the_next_process(tmp_path: Path) -> None:
    """A cursor that is taken again knows what was sent and what was rejected."""
    cursor = taken(tmp_path)
    cursor.settle(NAMES[0], "sent")
    cursor.settle(NAMES[1], "rejected")
    cursor.release()
    again = taken(tmp_path)
    assert again.settled == {NAMES[0]: "sent", NAMES[1]: "rejected"}
    again.release()


def test_the_file_is_as_documented(tmp_path: Path) -> None:
    """The log is a header and one line for each batch."""
    cursor = taken(tmp_path)
    cursor.settle(NAMES[0], "sent")
    cursor.release()
    text = (tmp_path / "cursors" / "platform.log").read_text()
    assert text == f"cirron-otel cursor 1\n{NAMES[0].removesuffix('.json')} sent\n"


def test_destinations_do_not_share_a_cursor(tmp_path: Path) -> None:
    """What one destination has says nothing of another."""
    one, other = taken(tmp_path, "platform"), taken(tmp_path, "otlp-1234abcd")
    one.settle(NAMES[0], "sent")
    assert not other.settled
    one.release()
    other.release()
    again = taken(tmp_path, "otlp-1234abcd")
    assert not again.settled
    again.release()


def test_a_name_that_is_no_file_name_stays_inside_the_directory(tmp_path: Path) -> None:
    """A destination's name never leads out of the directory of cursors."""
    cursor = taken(tmp_path, "../../x y")
    assert cursor.path.parent == tmp_path / "cursors"
    cursor.release()


def test_only_one_drains(tmp_path: Path) -> None:
    """While one holds the place no other gets it; afterwards the next one does."""
    first, second = taken(tmp_path), Cursor(tmp_path, "platform")
    assert not second.take()
    assert not second.held
    first.release()
    assert second.take()
    second.release()


def test_the_place_of_a_killed_process_is_free(tmp_path: Path, start_program: StartProgram) -> None:
    """Kill -9 frees the place, and what the dead one had settled counts."""
    process = start_program(
        f"""
        import time
        from pathlib import Path
        from cirron_otel.cursors import Cursor
        cursor = Cursor(Path({str(tmp_path)!r}), "platform")
        assert cursor.take()
        cursor.settle({NAMES[0]!r}, "sent")
        print("held", flush=True)
        time.sleep(60)
        """
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    assert not Cursor(tmp_path, "platform").take()
    process.send_signal(signal.SIGKILL)
    process.wait()
    cursor = taken(tmp_path)
    assert cursor.settled == {NAMES[0]: "sent"}
    cursor.release()


def test_a_forked_child_does_not_keep_the_place(tmp_path: Path) -> None:
    """A child that lets go of an inherited cursor leaves its parent's place the parent's alone."""
    cursor = taken(tmp_path)
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:  # nothing of pytest's may run in here
        cursor.close_in_child()
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    assert not Cursor(tmp_path, "platform").take()
    cursor.release()
    other = taken(tmp_path)
    other.release()
    os.write(go[1], b"x")
    os.waitpid(pid, 0)
    for fd in (*ready, *go):
        os.close(fd)


def test_a_torn_line_is_sent_again_and_harms_no_other(tmp_path: Path) -> None:
    """What a power failure left of a line is forgotten; lines written after it count."""
    cursor = taken(tmp_path)
    for name in NAMES[:3]:
        cursor.settle(name, "sent")
    cursor.release()
    with cursor.path.open("r+b") as log:
        log.truncate(cursor.path.stat().st_size - 10)
    again = taken(tmp_path)
    assert set(again.settled) == set(NAMES[:2])
    again.settle(NAMES[5], "sent")
    again.release()
    last = taken(tmp_path)
    assert set(last.settled) == {NAMES[0], NAMES[1], NAMES[5]}
    last.release()


@pytest.mark.parametrize("content", [b"", b"\0" * 500, b"cirron-otel cursor 2\nx\n", b"\xff\n"])
def test_a_log_of_another_kind_means_sending_all_again(tmp_path: Path, content: bytes) -> None:
    """Zeros, another version, an empty file: nothing is settled, and the log is usable again."""
    (tmp_path / "cursors").mkdir()
    (tmp_path / "cursors" / "platform.log").write_bytes(content)
    cursor = taken(tmp_path)
    assert not cursor.settled
    cursor.settle(NAMES[0], "sent")
    cursor.release()
    again = taken(tmp_path)
    assert set(again.settled) == {NAMES[0]}
    again.release()


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 700), junk=st.binary(max_size=80), cut=st.integers(0, 80))
def test_no_damage_settles_a_batch_that_was_not(
    tmp_path: Path, at: int, junk: bytes, cut: int
) -> None:
    """Whatever bytes are overwritten, only batches that were settled are taken for settled."""
    cursor = Cursor(tmp_path, "damaged")
    cursor.path.unlink(missing_ok=True)
    assert cursor.take()
    for name in NAMES[:10]:
        cursor.settle(name, "sent")
    cursor.release()
    data = cursor.path.read_bytes()
    cursor.path.write_bytes(data[:at] + junk + data[at + cut :])
    again = taken(tmp_path, "damaged")
    assert set(again.settled) & set(NAMES) <= set(NAMES[:10])
    again.settle(NAMES[11], "rejected")
    again.release()
    last = taken(tmp_path, "damaged")
    assert last.settled[NAMES[11]] == "rejected"
    last.release()


def test_the_log_does_not_outgrow_the_spool(tmp_path: Path) -> None:
    """A long run whose old batches leave has a log in proportion to the batches that are there."""
    cursor = taken(tmp_path)
    for start in range(0, 20_000, 100):
        for name in NAMES[start : start + 100]:
            cursor.settle(name, "sent")
        cursor.forget(set(NAMES[max(0, start - 200) : start + 100]))
    assert len(cursor.settled) <= 300
    assert cursor.path.stat().st_size < 3000 * 60
    newest = NAMES[19_999]
    assert cursor.settled[newest] == "sent"
    cursor.release()
    again = taken(tmp_path)
    assert newest in again.settled
    again.release()


def test_a_reader_follows_the_log(tmp_path: Path) -> None:
    """Somebody who does not drain sees each line soon, also across a rewrite and a torn line."""
    reader = CursorReader(tmp_path, "platform")
    reader.refresh()
    assert not reader.settled
    cursor = taken(tmp_path)
    cursor.settle(NAMES[0], "sent")
    reader.refresh()
    assert reader.settled == {NAMES[0]}
    cursor.settle(NAMES[1], "rejected")
    with cursor.path.open("ab") as log:
        log.write(b"00000")
    reader.refresh()
    assert reader.settled == {NAMES[0], NAMES[1]}
    cursor.release()
    again = taken(tmp_path)  # mends the torn line by writing a new log
    again.settle(NAMES[2], "sent")
    reader.refresh()
    assert reader.settled == set(NAMES[:3])
    assert reader.in_use
    again.release()
    assert not reader.in_use


def test_a_full_disk_forgets_nothing_in_this_process(tmp_path: Path) -> None:
    """Where no line can be written, what was settled counts here and is written when it can be."""
    program = f"""
import resource, signal
from pathlib import Path
from cirron_otel.cursors import Cursor
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
cursor = Cursor(Path({str(tmp_path)!r}), "platform")
assert cursor.take()
names = [f"{{i:020d}}-{{i:032x}}.json" for i in range(10)]
cursor.settle(names[0], "sent")
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (cursor.path.stat().st_size, hard))
assert not cursor.settle(names[1], "sent")
assert not cursor.settle(names[2], "rejected")
assert set(cursor.settled) == set(names[:3])
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
assert cursor.settle(names[3], "sent")
cursor.release()
again = Cursor(Path({str(tmp_path)!r}), "platform")
assert again.take()
assert set(again.settled) == set(names[:4]), again.settled
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_directory_that_cannot_be_used_is_a_clear_error(tmp_path: Path) -> None:
    """A file in the place of the directory is named, and nothing is left open."""
    (tmp_path / "cursors").write_text("in the way")
    with pytest.raises(SpoolError, match="cursors"):
        Cursor(tmp_path, "platform").take()


def test_evicted_first_is_what_every_destination_has(tmp_path: Path) -> None:
    """A batch leaves with rank 0 only when each destination of the process has it."""
    delivered = Delivered(tmp_path, ["platform", "otlp"])
    one, other = taken(tmp_path, "platform"), taken(tmp_path, "otlp")
    one.settle(NAMES[0], "sent")
    one.settle(NAMES[1], "sent")
    other.settle(NAMES[1], "rejected")
    assert [delivered(name) for name in NAMES[:3]] == [1, 0, 1]
    one.release()
    other.release()


def test_a_sidecar_s_destinations_count_while_it_runs(tmp_path: Path) -> None:
    """A cursor that another process drains by counts; one that nobody uses any more does not."""
    sidecar = taken(tmp_path, "otlp")
    sidecar.settle(NAMES[0], "sent")
    assert [Delivered(tmp_path)(name) for name in NAMES[:2]] == [0, 1]
    sidecar.release()
    assert [Delivered(tmp_path)(name) for name in NAMES[:2]] == [0, 0]
