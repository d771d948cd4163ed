"""The spool directory: atomic writes, listing, reading, the cap, and disks that refuse."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cirron_otel.spool as spool_module
from cirron_otel.batch import Batch, encode
from cirron_otel.errors import SpoolError, SpoolFormatError
from cirron_otel.spool import TMP_MAX_AGE_S, Spool, created_ns_of

WAYS = ("in one go", "step by step")
SOURCE = str(Path(spool_module.__file__).parents[1])


def batch_id(number: int) -> str:
    """A batch id that tells which batch it is."""
    return f"{number:032x}"


def write(spool: Spool, number: int, chunks: list[bytes | memoryview] | None = None) -> Path:
    """Write batch ``number`` (its time in ns, too), by default a small valid one."""
    if chunks is None:
        chunks = [encode(Batch(1, "0", batch_id(number), number))]
    size = spool.write(chunks, created_ns=number, batch_id=batch_id(number))
    path = spool.directory / f"{number:020d}-{batch_id(number)}.json"
    if path.exists():
        assert path.stat().st_size == size
    return path


def numbers(spool: Spool) -> list[int]:
    """The batches that are there, by number."""
    return [created_ns_of(path) for path in spool.files()]


def names(directory: Path) -> list[str]:
    """Everything that lies in a directory."""
    return sorted(path.name for path in directory.iterdir())


def program(source: str, *arguments: object) -> subprocess.Popen[str]:
    """A Python program running beside the test."""
    return subprocess.Popen(
        [sys.executable, "-c", source, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": SOURCE},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How files are written: by the compiled module, or as where there is none."""
    if request.param == "step by step":
        monkeypatch.setattr(spool_module, "_write_whole", None)
        monkeypatch.setattr(spool_module, "_scan_batches", None)
    elif spool_module._write_whole is None:
        pytest.skip("the compiled module was not built")
    return str(request.param)


@settings(max_examples=50, deadline=None)
@given(chunks=st.lists(st.binary(max_size=40), max_size=30), number=st.integers(0, 2**63))
def test_the_file_has_the_chunks_in_order(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes], number: int
) -> None:
    """Whatever the chunks, the file is their concatenation and the size is right."""
    spool = Spool(tmp_path_factory.mktemp("spool"))
    mixed = [memoryview(chunk) if i % 2 else chunk for i, chunk in enumerate(chunks)]
    path = write(spool, number, mixed)
    assert path.read_bytes() == b"".join(chunks)
    assert spool.files() == [path]
    assert names(spool.directory) == [path.name]
    path.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spool_module, "_write_whole", None)
        assert write(spool, number, mixed).read_bytes() == b"".join(chunks)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("count", [1023, 1024, 1025, 5000])
def test_more_chunks_than_one_call_takes(tmp_path: Path, count: int) -> None:
    """The number of chunks is not limited by what one system call takes."""
    chunks: list[bytes | memoryview] = [b"%d," % i for i in range(count)]
    path = write(Spool(tmp_path), 1, chunks)
    assert path.read_bytes() == b"".join(chunks)


@pytest.mark.usefixtures("way")
def test_wide_memoryviews_count_in_bytes(tmp_path: Path) -> None:
    """A view whose items are wider than a byte is written whole."""
    view = memoryview(bytes(range(64))).cast("Q")
    assert write(Spool(tmp_path), 1, [b"[", view, b"]"]).stat().st_size == 66


def test_short_writes_are_continued() -> None:
    """A call that was interrupted half way, here by signals, goes on where it stopped."""
    reading, writing = os.pipe()
    arrived: list[bytes] = []

    def read_slowly() -> None:
        while data := os.read(reading, 1 << 16):
            arrived.append(data)
            time.sleep(0.0005)

    before = signal.signal(signal.SIGALRM, lambda *_: None)
    reader = threading.Thread(target=read_slowly)
    reader.start()
    chunks: list[bytes | memoryview] = [bytes([i % 251]) * 40_000 for i in range(120)]
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
        assert spool_module._write_chunks(writing, chunks) == 4_800_000
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        os.close(writing)
        reader.join()
        os.close(reading)
    assert b"".join(arrived) == b"".join(chunks)


def test_making_a_spool_touches_nothing(tmp_path: Path) -> None:
    """A spool that nobody writes to leaves no directory, and reads as empty."""
    spool = Spool(tmp_path / "out")
    assert (spool.files(), spool.size(), spool.count(), spool.clear()) == ([], 0, 0, (0, 0))
    assert list(spool.batches()) == []
    assert names(tmp_path) == []


@pytest.mark.usefixtures("way")
def test_the_directory_is_deleted_between_writes(tmp_path: Path) -> None:
    """A directory deleted under a running program is made again, and nothing is raised."""
    spool = Spool(tmp_path / "deep" / "out")
    write(spool, 1)
    shutil.rmtree(tmp_path / "deep")
    write(spool, 2)
    assert numbers(spool) == [2]


def test_the_tmp_file_is_deleted_during_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the directory goes while a batch is being written, the batch is written again."""
    monkeypatch.setattr(spool_module, "_write_whole", None)
    spool = Spool(tmp_path / "out")

    class Deleting(list[bytes]):
        deleted = False

        def __getitem__(self, key: object) -> list[bytes]:  # type: ignore[override]
            if not self.deleted:
                self.deleted = True
                shutil.rmtree(spool.root)
            return list(self)

    assert spool.write(Deleting([b"{}"]), created_ns=5, batch_id=batch_id(5)) == 2
    assert [path.read_bytes() for path in spool.files()] == [b"{}"]


@pytest.mark.usefixtures("way")
def test_another_process_deletes_the_tmp_file(tmp_path: Path) -> None:
    """Whatever deletes a .tmp that is being written, the batch arrives whole."""
    spool = Spool(tmp_path)
    write(spool, 1)
    deleted = threading.Event()

    def delete() -> None:
        while not deleted.is_set():
            for name in names(spool.directory):
                if name.endswith(".tmp"):
                    with contextlib.suppress(FileNotFoundError):
                        (spool.directory / name).unlink()
                        deleted.set()

    deleter = threading.Thread(target=delete)
    deleter.start()
    try:
        for number in range(2, 200):
            path = write(spool, number, [b"x" * 1_000_000] * 8)
            assert path.stat().st_size == 8_000_000
            path.unlink()
            if deleted.is_set():
                return
        pytest.fail("no .tmp was ever deleted")
    finally:
        deleted.set()
        deleter.join()


def test_only_batch_files_are_listed_oldest_first(tmp_path: Path) -> None:
    """In-flight files, foreign files and directories are no batches."""
    spool = Spool(tmp_path)
    for number in (30, 4, 200):
        write(spool, number)
    foreign = ["x.json", f"{1:020d}-{batch_id(1)}.json.tmp", f"{1:020d}-{batch_id(1)}.json\n"]
    foreign += [f"{1:019d}-{batch_id(1)}.json", f"{1:020d}-{'G' * 32}.json", "cursor"]
    for name in foreign:
        (spool.directory / name).write_text("{")
    (spool.directory / f"{2:020d}-{batch_id(2)}.json").mkdir()
    assert numbers(spool) == [4, 30, 200]
    assert spool.count() == 3
    sizes = [path.stat().st_size for path in spool.files()]
    assert spool.size() == sum(sizes) + 1
    assert spool.clear() == (4, sum(sizes) + 1)
    assert len(names(spool.directory)) == len(foreign)


def test_reading_passes_over_what_is_broken_and_what_vanishes(tmp_path: Path) -> None:
    """One bad file costs itself alone, is told by name, and a vanished one is not an error."""
    spool = Spool(tmp_path)
    for number in range(1, 6):
        write(spool, number)
    bad = write(spool, 3, [b'{"schema_version": 1, '])
    errors: list[tuple[Path, Exception]] = []
    seen: list[int] = []
    for _, batch in spool.batches(newest_first=True, on_error=lambda p, e: errors.append((p, e))):
        seen.append(batch.created_ns)
        if batch.created_ns == 5:
            spool.files()[0].unlink()
    assert seen == [5, 4, 2]
    assert [path for path, _ in errors] == [bad]
    assert isinstance(errors[0][1], SpoolFormatError)
    assert bad.name in str(errors[0][1])
    assert [batch.created_ns for _, batch in spool.batches()] == [2, 4, 5]
    with pytest.raises(SpoolFormatError, match=bad.name):
        spool.read(bad)
    with pytest.raises(FileNotFoundError):
        spool.read(spool.directory / "gone")
    with pytest.raises(SpoolError, match="Is a directory"):
        spool.read(spool.directory)


@pytest.mark.parametrize(("created_ns", "name"), [(1, "xyz"), (-1, "0" * 32), (10**20, "0" * 32)])
def test_names_that_readers_would_not_see_are_refused(
    tmp_path: Path, created_ns: int, name: str
) -> None:
    """A time or id that makes no batch name is a mistake of the caller."""
    with pytest.raises(ValueError, match="not a batch"):
        Spool(tmp_path).write([b"{}"], created_ns=created_ns, batch_id=name)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("where", ["out", "out/spool"])
def test_a_file_in_the_way(tmp_path: Path, where: str) -> None:
    """A file where the directory should be is an error that names the path."""
    (tmp_path / where).parent.mkdir(exist_ok=True)
    (tmp_path / where).write_text("")
    spool = Spool(tmp_path / "out")
    with pytest.raises(SpoolError, match=str(tmp_path / "out")):
        write(spool, 1)
    with pytest.raises(SpoolError, match=r"list .*Not a directory"):
        spool.files()
    with pytest.raises(SpoolError, match=r"list .*Not a directory"):
        spool.size()


@pytest.mark.usefixtures("way")
def test_another_writers_tmp_file_is_left_alone(tmp_path: Path) -> None:
    """Two writers of one batch never write into one file, and neither removes the other's."""
    spool = Spool(tmp_path)
    path = write(spool, 1)
    tmp = path.with_name(path.name + ".tmp")
    tmp.write_text("the other's")
    with pytest.raises(SpoolError, match="File exists"):
        write(spool, 1)
    assert tmp.read_text() == "the other's"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB; skips where this user may not mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    mount = shutil.which("mount")
    done = mount and subprocess.run([mount, *options], capture_output=True, check=False)
    if not done or done.returncode != 0:
        pytest.skip("may not mount a file system")
    try:
        yield disk
    finally:
        subprocess.run([shutil.which("umount") or "umount", str(disk)], check=True)


@pytest.mark.usefixtures("way")
def test_a_full_disk(small_disk: Path) -> None:
    """A full disk is an error with a hint, leaves nothing half-written, and passes."""
    spool = Spool(small_disk)
    first = write(spool, 1, [b"x" * 20_000])
    with pytest.raises(SpoolError, match=r"No space left.*free some space"):
        write(spool, 2, [b"y" * 10_000] * 10)
    assert names(spool.directory) == [first.name]
    first.unlink()
    write(spool, 3, [b"z" * 30_000])
    assert numbers(spool) == [3]


def test_a_file_size_limit(tmp_path: Path) -> None:
    """Where the system stops a write half way, the half is removed and the reason told."""
    source = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from cirron_otel.spool import Spool\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        "try:\n"
        "    Spool(Path(sys.argv[1])).write([b'x' * 999] * 50, created_ns=1, batch_id='a' * 32)\n"
        "except Exception as exc:\n"
        "    print(type(exc).__name__, exc)\n"
    )
    out, err = program(source, tmp_path).communicate(timeout=30)
    assert err == ""
    assert out.startswith("SpoolError cannot write")
    assert "ulimit -f" in out
    assert names(tmp_path / "spool") == []


@pytest.mark.parametrize("way", WAYS)
def test_killed_during_a_write(tmp_path: Path, way: str) -> None:
    """A writer killed half way leaves a .tmp that readers ignore and that goes after an hour."""
    source = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from cirron_otel import spool\n"
        "if sys.argv[2] == 'step by step':\n"
        "    spool._write_whole = spool._scan_batches = None\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))\n"
        "chunks = [b'{'] * 2000\n"
        "spool.Spool(Path(sys.argv[1])).write(chunks, created_ns=1, batch_id='a' * 32)\n"
    )
    killed = program(source, tmp_path, way)
    killed.communicate(timeout=30)
    assert killed.returncode == -signal.SIGXFSZ
    (tmp,) = (tmp_path / "spool").iterdir()
    assert tmp.name.endswith(".json.tmp")
    assert tmp.stat().st_size == 1024

    spool = Spool(tmp_path)
    assert spool.files() == []
    assert spool.size() == 1024
    write(spool, 2)
    assert tmp.exists()
    old = time.time() - TMP_MAX_AGE_S - 60
    os.utime(tmp, (old, old))
    later = Spool(tmp_path)
    write(later, 3)
    assert not tmp.exists()
    assert later.swept_tmp == 1
    assert numbers(later) == [2, 3]


@pytest.mark.usefixtures("way")
def test_the_oldest_of_2000_files_leave(tmp_path: Path) -> None:
    """Under a cap by number, the newest stay, and every file is either there or counted."""
    spool = Spool(tmp_path, max_files=1500)
    for number in range(2000):
        write(spool, number, [b"%04d" % number])
        assert spool.evicted_files == max(0, number + 1 - 1500)
    assert numbers(spool) == list(range(500, 2000))
    assert spool.evicted_bytes == 500 * 4


@pytest.mark.usefixtures("way")
def test_the_oldest_leave_by_size(tmp_path: Path) -> None:
    """Under a cap by bytes, the directory never holds more than the cap after a write."""
    spool = Spool(tmp_path, max_bytes=10_000)
    for number in range(300):
        write(spool, number, [b"x" * (number % 17) * 100])
        assert spool.size() <= 10_000
    assert numbers(spool)[-1] == 299
    assert spool.evicted_files == 300 - spool.count()


@pytest.mark.usefixtures("way")
def test_the_file_just_written_stays(tmp_path: Path) -> None:
    """However small the cap, a batch is not thrown away by its own write."""
    spool = Spool(tmp_path, max_bytes=1)
    for number in (9, 8, 10):
        write(spool, number)
        assert numbers(spool) == [number]
    assert spool.evicted_files == 2


@pytest.mark.usefixtures("way")
def test_tmp_files_alone_evict_nothing(tmp_path: Path) -> None:
    """When in-flight files fill the cap, throwing batches away would win nothing."""
    spool = Spool(tmp_path, max_bytes=5_000)
    write(spool, 1)
    tmp = spool.directory / f"{2:020d}-{batch_id(2)}.json.tmp"
    tmp.write_bytes(b"x" * 6_000)
    again = Spool(tmp_path, max_bytes=5_000)
    write(again, 3)
    assert numbers(again) == [1, 3]
    assert again.evicted_files == 0


@pytest.mark.usefixtures("way")
def test_a_cap_lowered_far_below_what_is_there(tmp_path: Path) -> None:
    """A spool far over its cap comes down to it at one write."""
    (tmp_path / "spool").mkdir()
    for number in range(3000):
        (tmp_path / "spool" / f"{number:020d}-{batch_id(number)}.json").write_bytes(b"{}")
    spool = Spool(tmp_path, max_files=10)
    write(spool, 3000)
    assert numbers(spool) == list(range(2991, 3001))
    assert spool.evicted_files == 2991


def test_an_order_of_leaving(tmp_path: Path) -> None:
    """What the caller ranks lower leaves first, within a rank the oldest."""

    def odd_first(name: str) -> int:
        return 0 if int(name[:20]) % 2 else 1

    full = Spool(tmp_path)
    for number in range(10):
        write(full, number)
    spool = Spool(tmp_path, max_files=4, evict_order=odd_first)
    write(spool, 10)
    assert numbers(spool) == [4, 6, 8, 10]


@pytest.mark.usefixtures("way")
def test_what_others_add_and_remove_is_seen(tmp_path: Path) -> None:
    """The running total is corrected by what is really there, at the latest after 256 writes."""
    spool = Spool(tmp_path, max_files=1000)
    write(spool, 0)
    for number in range(1, 1501):
        (spool.directory / f"{number:020d}-{batch_id(number)}.json").write_bytes(b"{}")
    for number in range(2000, 2256):
        write(spool, number)
    assert spool.count() == 1000
    assert numbers(spool)[-256:] == list(range(2000, 2256))
    evicted = spool.evicted_files
    Spool(tmp_path).clear()
    for number in range(3000, 3600):
        write(spool, number)
    assert numbers(spool) == list(range(3000, 3600))
    assert spool.evicted_files == evicted


def test_several_processes_in_one_full_directory(tmp_path: Path) -> None:
    """Ranks that write and evict at once do not disturb one another and keep near the cap."""
    source = (
        "import sys\n"
        "from pathlib import Path\n"
        "from cirron_otel.batch import Batch, encode\n"
        "from cirron_otel.spool import Spool\n"
        "spool = Spool(Path(sys.argv[1]), max_files=100)\n"
        "for i in range(400):\n"
        "    t, name = i * 10 + int(sys.argv[2]), f'{i:031x}{sys.argv[2]}'\n"
        "    spool.write([encode(Batch(1, '0', name, t))], created_ns=t, batch_id=name)\n"
        "print(spool.evicted_files)\n"
    )
    ranks = [program(source, tmp_path, rank) for rank in range(3)]
    evicted = 0
    for rank in ranks:
        out, err = rank.communicate(timeout=60)
        assert err == ""
        evicted += int(out)
    spool = Spool(tmp_path)
    assert 80 <= spool.count() <= 130
    assert spool.count() + evicted == 1200
    assert len(list(spool.batches())) == spool.count()
    assert all(not name.endswith(".tmp") for name in names(spool.directory))
