"""Verdicts over the real records, over hostile ones, and over every way to change one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cirron_otel.errors import RecordError
from cirron_otel.training_record.chain import DIARY, GENESIS, METRICS, SEAL, line_hash
from cirron_otel.training_record.checking.verify import FORMAT_CHECKS, Verdict, verify
from record.tampering import RECORDS, read, rewrite, texts, write_texts

KEY = RECORDS / "signed" / "signer.pub.pem"
CASES = sorted(path.parent.name for path in RECORDS.glob("*/expected_verify.json"))
#: Where our verdict differs from the existing verifier's, and why. None does.
STRICTER: dict[str, dict[str, str]] = {}


def statuses(verdict: Verdict) -> dict[str, str]:
    """Check to status."""
    return {check.name: check.status for check in verdict.checks}


def bad(verdict: Verdict) -> dict[str, str]:
    """Failed check to message."""
    return {check.name: check.message for check in verdict.checks if check.status == "fail"}


@pytest.fixture
def signed(tmp_path: Path) -> Path:
    """A copy of a sealed and signed record."""
    return Path(shutil.copytree(RECORDS / "signed", tmp_path / "signed"))


@pytest.fixture
def watched(tmp_path: Path) -> Path:
    """A copy of a record with alarms, a certificate and dead channels, not sealed."""
    return Path(shutil.copytree(RECORDS / "lesion_watch", tmp_path / "watched"))


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_is_that_of_the_existing_verifier(case: str) -> None:
    """All nine checks, the totals and the head are as the existing verifier found them."""
    expected = json.loads((RECORDS / case / "expected_verify.json").read_text())
    found = next(iter((RECORDS / case).glob("*.diary.jsonl")), RECORDS / case)
    verdict = verify(found, key=KEY if case == "signed" else None, strict=expected["strict"])
    nine = {check["name"]: check["status"] for check in expected["checks"]}
    assert list(statuses(verdict))[:9] == list(nine) == list(FORMAT_CHECKS)
    assert {name: statuses(verdict)[name] for name in nine} == nine | STRICTER.get(case, {})
    for name in ("ok", "complete", "events", "head", "passed", "strict"):
        assert verdict.to_dict()[name] == expected[name], name


@pytest.mark.parametrize("case", [case for case in CASES if case != "v0_1_fixture"])
def test_every_real_record_replays(case: str) -> None:
    """Each event that follows from the rows is recomputed; none is missing, none is too many."""
    verdict = verify(RECORDS / case)
    assert verdict.check("replay").status == "pass"
    assert verdict.check("rows").status == "pass"


def test_a_record_without_metrics_says_why_it_does_not_replay() -> None:
    """A diary on its own has no rows: that is no failure, and it is said."""
    verdict = verify(RECORDS / "v0_1_fixture" / "v0_1_cifar10_with_repair.diary.jsonl")
    assert verdict.check("replay").status == "absent"
    assert verdict.run_dir is None
    assert verdict.ok


def test_the_verdict_is_json() -> None:
    """The JSON form has the existing verifier's keys, in its order, and ours after them."""
    found = json.loads(json.dumps(verify(RECORDS / "signed", key=KEY, strict=True).to_dict()))
    first = [
        "path",
        "diary",
        "run_dir",
        "events",
        "head",
        "ok",
        "complete",
        "checks",
        "strict",
        "passed",
    ]
    assert list(found)[: len(first)] == first
    assert found["passed"] is True
    assert set(found["checks"][0]) == {"name", "label", "status", "message"}


# --- keys -----------------------------------------------------------------------------------------


def test_a_key_without_a_signature_fails() -> None:
    """Who gives a key wants a signature: none is a failure, also for a diary on its own (R-W10)."""
    for path in (
        RECORDS / "healthy",
        RECORDS / "v0_1_fixture/v0_1_cifar10_with_repair.diary.jsonl",
    ):
        verdict = verify(path, key=KEY)
        assert list(bad(verdict)) == ["signature"]


def test_another_key_fails(signed: Path) -> None:
    """The signature of one key is not that of another, raw or in a file."""
    found = bad(verify(signed, key=bytes(range(32))))
    assert list(found) == ["signature"]
    assert "the seal names the key" in found["signature"]


def test_a_signature_without_a_key_is_unchecked(signed: Path) -> None:
    """Without the key a signature is neither good nor bad, and a strict verdict does not pass."""
    verdict = verify(signed, strict=True)
    assert verdict.check("signature").status == "unchecked"
    assert verdict.ok
    assert not verdict.passed


def test_no_record_is_an_error(tmp_path: Path) -> None:
    """Where there is no diary there is no verdict."""
    for path in (tmp_path, tmp_path / "nothing", tmp_path / DIARY):
        with pytest.raises(RecordError, match="no training record"):
            verify(path)


# --- every way to change a record -----------------------------------------------------------------


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([DIARY, METRICS, SEAL, "record.sig"]), st.data())
def test_any_changed_byte_of_a_sealed_record_is_found(
    signed: Path, name: str, data: st.DataObject
) -> None:
    """One byte changed anywhere in any of the four files is a failure."""
    path = signed / name
    raw = path.read_bytes()
    place = data.draw(st.integers(0, len(raw) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != raw[place]))
    path.write_bytes(raw[:place] + bytes([byte]) + raw[place + 1 :])
    try:
        assert bad(verify(signed, key=KEY))
    finally:
        path.write_bytes(raw)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_changed_byte_of_a_diary_is_found(watched: Path, data: st.DataObject) -> None:
    """Without a seal too: it fails, or the line means the same and its spelling is noted."""
    path = watched / DIARY
    raw = path.read_bytes()
    place = data.draw(st.integers(0, len(raw) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != raw[place]))
    changed = raw[:place] + bytes([byte]) + raw[place + 1 :]
    path.write_bytes(changed)
    try:
        verdict = verify(watched)
        # A line end may be missing behind the last line, or be one as Windows has it.
        assert bad(verdict) or "note" in {
            verdict.check(name).status for name in ("spelling", "ending")
        }
    finally:
        path.write_bytes(raw)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(1, 7000), whole_lines=st.booleans())
def test_any_cut_is_found_or_called_a_crash(watched: Path, size: int, *, whole_lines: bool) -> None:
    """A diary that lacks its end never passes; a half-written line is told from a changed one."""
    path = watched / DIARY
    raw = path.read_bytes()
    cut = raw[: max(1, len(raw) - size)]
    if whole_lines:
        cut = cut[: cut.rfind(b"\n") + 1]
    path.write_bytes(cut)
    try:
        verdict = verify(watched)
        if cut == raw[:-1]:
            assert verdict.check("ending").status == "note"
            return
        assert {"bookends", "genesis"} & set(bad(verdict))
        assert verdict.half_written == (bool(cut) and not cut.endswith(b"\n") and cut + b"\n" not in
                                        raw)  # fmt: skip
        if verdict.half_written and cut.count(b"\n"):
            assert "half-written" in verdict.check("parse").message
    finally:
        path.write_bytes(raw)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.permutations(range(10)), st.integers(0, 9))
def test_any_order_but_the_written_one_is_found(
    watched: Path, order: list[int], count: int
) -> None:
    """Lines swapped, left out or given twice break the chain."""
    lines = texts(watched)
    chosen = [lines[index] for index in order] + lines[:count]
    if chosen == lines:
        return
    write_texts(watched, chosen)
    try:
        assert "chain" in bad(verify(watched))
    finally:
        write_texts(watched, lines)


# --- hostile records ------------------------------------------------------------------------------

NASTY = [
    b"",
    b"\n\n\n",
    b"\0" * 5000,
    b"[" * 200_000,
    b"{" * 200_000,
    b'{"a":' * 100_000,
    b"9" * 100_000,
    b'{"seq": ' + b"9" * 5000 + b"}\n",
    b'{"seq": 0, "time": 1e999, "event": {"a": []}, "prev": [], "hash": {}}\n' * 3,
    b'{"seq": null, "event": "run_start", "config": [1], "record_version": 1}\n',
    b'{"event": "run_end", "counts": 5, "steps": "x", "metrics_sha256": 7}\n',
    b'{"event": "alarm", "step": 1e400, "layer": {}, "diagnosis": null}\n',
    b'{"event": "channels", "step": 0, "layer": [], "channels": "x", "level": 1}\n',
    b'{"metrics_digest": "x", "metrics_rows": 99999999999999999999999}\n',
    b'{"event": "\\ud800", "prev": "\\udfff", "hash": "\\u0000"}\n',
    b"\xff\xfe\x00{",
    b"\xef\xbb\xbf{}\n",
    b'{"event": "run_start", "previous_head": 5, "previous_directory": "../..", "segment": []}\n',
    b'{"event": "run_start", "previous_head": "x", "previous_directory": "."}\n',
    b"\r\n\r\n{}\r{}\r\n",
]


@pytest.mark.parametrize("diary", NASTY)
@pytest.mark.parametrize("other", [b"", b"{}\n[]\n", b"\xff" * 100, b'{"files": {"\\u0000": 1}}'])
def test_whatever_the_files_hold_there_is_a_verdict(
    tmp_path: Path, diary: bytes, other: bytes
) -> None:
    """No content raises, all nine checks are there, and nothing unprintable is echoed."""
    run = tmp_path / "run"
    run.mkdir()
    (run / DIARY).write_bytes(diary)
    for name in (METRICS, SEAL, "record.sig"):
        (run / name).write_bytes(other)
    verdict = verify(run, key=KEY, strict=True)
    assert not verdict.passed
    assert tuple(statuses(verdict))[:9] == FORMAT_CHECKS
    for check in verdict.checks:
        assert check.message.isprintable()
        assert len(check.message) < 1000


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**65) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["step", "loss", "grad", "stuck", "a"]), inner, max_size=3
        )
    ),
    max_leaves=4,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_field_may_hold_anything(watched: Path, data: st.DataObject) -> None:
    """A field of any event or row replaced by any JSON value, hashed anew, gives a verdict."""
    events, rows = read(watched), (watched / METRICS).read_text()
    changed = [dict(event) for event in events]
    event = data.draw(st.sampled_from(changed))
    name = data.draw(st.sampled_from([*event, "metrics_digest", "metrics_rows", "lost_before"]))
    event[name] = data.draw(_JSON)
    lines = [json.loads(line) for line in rows.splitlines()]
    row = data.draw(st.sampled_from(lines))
    row[data.draw(st.sampled_from([*row, "nonfinite", "digest"]))] = data.draw(_JSON)
    try:
        rewrite(watched, changed)
        (watched / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
        verdict = verify(watched)
        assert all(check.message.isprintable() for check in verdict.checks)
    finally:
        rewrite(watched, events)
        (watched / METRICS).write_text(rows)


@pytest.mark.parametrize("name", [DIARY, METRICS, SEAL, "record.sig"])
@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_only_regular_files_count(signed: Path, name: str, kind: str) -> None:
    """A link, a pipe or a directory in the place of a file fails, and nobody waits for it."""
    path = signed / name
    data = path.read_bytes()
    path.unlink()
    if kind == "link":
        (signed / "elsewhere").write_bytes(data)
        path.symlink_to("elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    verdict = verify(signed, key=KEY)
    failed = {DIARY: "parse", METRICS: "metrics", SEAL: "seal", "record.sig": "signature"}
    assert failed[name] in bad(verdict)
    if name == DIARY:
        assert set(statuses(verdict).values()) == {"fail", "skipped"}


def test_lines_may_end_as_on_windows(tmp_path: Path) -> None:
    """A diary with CR LF line ends verifies."""
    run = shutil.copytree(RECORDS / "healthy", tmp_path / "run")
    (run / DIARY).write_bytes((run / DIARY).read_bytes().replace(b"\n", b"\r\n"))
    assert verify(run).ok


def test_a_compact_line_in_another_order_verifies(watched: Path) -> None:
    """Neither white space nor key order belongs to the hash."""
    lines = [
        json.dumps(dict(reversed(event.items())), separators=(",", ":")) for event in read(watched)
    ]
    write_texts(watched, lines)
    verdict = verify(watched)
    assert verdict.ok
    assert verdict.check("spelling").status == "pass"


@pytest.mark.parametrize("gap", ["", "  "])
@pytest.mark.parametrize("seq", [1.0, True, "1"])
def test_a_seq_is_an_int_however_the_line_is_spelled(watched: Path, seq: object, gap: str) -> None:
    """1.0 and true are not 1, on a line that is read the fast way and on one that is not."""
    events = read(watched)
    events[1]["seq"] = seq
    lines = map(json.dumps, events)
    write_texts(watched, [line.replace('"event": "', f'"event": {gap}"') for line in lines])
    check = verify(watched).check("seq")
    assert (check.status, check.message) == ("fail", f"event 1 has seq {seq}")


def test_long_values_are_clipped(tmp_path: Path) -> None:
    """What is echoed of a record is short and has nothing a terminal would obey."""
    run = tmp_path / "run"
    run.mkdir()
    body: dict[str, Any] = {"seq": 0, "time": 1.0, "event": "\x1b[31m" + "x" * 10_000}
    line = {**body, "prev": GENESIS, "hash": line_hash(GENESIS, body)}
    (run / DIARY).write_text(json.dumps(line) + "\n")
    (run / METRICS).write_text("")
    verdict = verify(run)
    assert all(len(check.message) < 300 for check in verdict.checks)
    assert "\x1b" not in json.dumps(verdict.to_dict(), ensure_ascii=False)


def test_memory_does_not_grow_with_the_record(tmp_path: Path) -> None:
    """Verifying 60 MB takes hardly more memory than verifying 1 MB."""
    program = (
        "import re, sys; from cirron_otel.training_record.checking.verify import verify\n"
        "assert verify(sys.argv[1]).check('chain').status == 'pass'\n"
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])"
    )
    used = []
    for megabytes in (1, 60):
        path = tmp_path / f"{megabytes}.jsonl"
        prev = GENESIS
        with path.open("w") as file:
            for seq in range(megabytes * 500):
                body: dict[str, object] = {
                    "seq": seq, "time": 1.0, "event": "no_gradients", "message": "x" * 1800,
                }  # fmt: skip
                digest = line_hash(prev, body)
                file.write(json.dumps({**body, "prev": prev, "hash": digest}) + "\n")
                prev = digest
        done = subprocess.run(
            [sys.executable, "-c", program, str(path)], check=True, capture_output=True, text=True
        )
        used.append(int(done.stdout))
    assert used[1] < used[0] + 8 * 1024
    assert used[1] < 60 * 1024
