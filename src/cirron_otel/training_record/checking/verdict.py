"""Verifying a training record: nine checks of the format, and further ones of our own.

This is the part that knows no keys: whoever signs a record verifies it first, so the keys' module
stands above this one. :mod:`~cirron_otel.training_record.checking.verify` is what others call.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cirron_otel.errors import RecordError
from cirron_otel.training_record.chain import DIARY, METRICS
from cirron_otel.training_record.checking import anchors as anchoring
from cirron_otel.training_record.checking.checks import format_checks, own_checks
from cirron_otel.training_record.checking.diary import Diary
from cirron_otel.training_record.checking.findings import (
    ABSENT,
    FAIL,
    PASS,
    SKIPPED,
    Check,
    Findings,
)
from cirron_otel.training_record.checking.reader import NotRegularError, as_of_now, open_regular
from cirron_otel.training_record.checking.replay import Replay
from cirron_otel.training_record.checking.rows import Rows
from cirron_otel.training_record.checking.seal_check import (
    Known,
    PublicKey,
    check_seal,
    check_signature,
)

#: The checks every verifier of the format makes, in its order. What follows them is ours.
FORMAT_CHECKS = (
    "parse",
    "genesis",
    "chain",
    "seq",
    "bookends",
    "schema",
    "metrics",
    "seal",
    "signature",
)
_MAX_SEGMENTS = 50


class Verdict(NamedTuple):
    """What was found. ``checks`` has the format's nine first, in order, then our own.

    ``run_dir`` is None for a diary on its own; ``head`` is the hash of the last line.
    """

    path: str
    diary: str
    run_dir: str | None
    events: int
    head: str | None
    checks: tuple[Check, ...]
    strict: bool
    run_id: str | None
    #: Whether the record ends in ``run_end``, and in a line that its writer did not finish.
    finished: bool
    half_written: bool
    #: As ``run_start`` has it.
    record_version: object

    @property
    def ok(self) -> bool:
        """No check failed."""
        return all(check.status != FAIL for check in self.checks)

    @property
    def complete(self) -> bool:
        """All nine checks of the format passed, and none of ours failed."""
        nine = (check for check in self.checks if check.name in FORMAT_CHECKS)
        return self.ok and all(check.status == PASS for check in nine)

    @property
    def passed(self) -> bool:
        """What was asked for holds: :attr:`complete` where ``strict``, else :attr:`ok`."""
        return self.complete if self.strict else self.ok

    def check(self, name: str) -> Check:
        """The check of that name. Raises ``KeyError``."""
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """As JSON data."""
        return {
            "path": self.path,
            "diary": self.diary,
            "run_dir": self.run_dir,
            "events": self.events,
            "head": self.head,
            "ok": self.ok,
            "complete": self.complete,
            "checks": [check._asdict() for check in self.checks],
            "strict": self.strict,
            "passed": self.passed,
            "run_id": self.run_id,
            "finished": self.finished,
            "half_written": self.half_written,
        }


def verify_files(
    path: Path,
    key: PublicKey | None = None,
    *,
    strict: bool = False,
    anchors: Sequence[anchoring.Anchor] | None = None,
) -> Verdict:
    """As ``verify`` in ``checking/verify.py``, once key and anchors are there."""
    try:
        return _verify(path, key, strict=strict, anchors=anchors, segments=_MAX_SEGMENTS)
    except OSError as exc:
        if isinstance(exc, RecordError):
            raise
        raise RecordError(f"cannot read the record at {path}: {exc.strerror or exc}") from exc


def _verify(
    path: Path,
    key: PublicKey | None,
    *,
    strict: bool,
    anchors: Sequence[anchoring.Anchor] | None,
    segments: int,
) -> Verdict:
    directory, diary_path = _located(path)
    watch = None if anchors is None else anchoring.AnchorCheck(list(anchors))

    def verdict(checks: Sequence[Check], diary: Diary | None) -> Verdict:
        run_id = None if diary is None else diary.first.get("run_id")
        return Verdict(
            str(path),
            str(diary_path),
            None if directory is None else str(directory),
            0 if diary is None else diary.count,
            None if diary is None else diary.head,
            tuple(checks),
            strict,
            run_id if isinstance(run_id, str) else None,
            diary is not None and diary.finished,
            diary is not None and diary.half_line is not None,
            None if diary is None else diary.first.get("record_version"),
        )

    findings = Findings()
    try:
        file = open_regular(diary_path, follow=directory is None)
    except NotRegularError as exc:
        return verdict(_unreadable(str(exc)), None)
    with file:
        metrics, why = _open_metrics(directory)
        try:
            lines, row_lines = (file, None) if metrics is None else as_of_now(file, metrics)
            rows = Rows(row_lines, findings, {} if watch is None else watch.wanted)
            replay = None if metrics is None else Replay(rows, findings)
            diary = Diary(findings, replay, watch)
            diary.read(lines)
            if replay is not None:
                replay.finish()
        finally:
            if metrics is not None:
                metrics.close()
    digests = {DIARY: diary.file_digest}
    if replay is not None:
        digests[METRICS] = rows.file_digest
    version = diary.first.get("record_version")
    seal = check_seal(directory, Known(diary.head, diary.count, version, digests))
    signature = check_signature(directory, seal, key)
    checks = [
        *format_checks(diary, findings, directory, digests.get(METRICS), why),
        seal.check,
        signature,
        *own_checks(diary, findings, replay, seal),
    ]
    checks.append(_check_previous(directory, diary, segments))
    if watch is not None:
        checks.append(watch.result(with_metrics=replay is not None))
    return verdict(checks, diary)


def _located(path: Path) -> tuple[Path | None, Path]:
    """The run directory, None for a diary on its own, and the diary."""
    if path.is_dir():
        directory, diary = path, path / DIARY
    elif path.name == DIARY:
        directory, diary = path.parent, path
    else:
        directory, diary = None, path
    if not os.path.lexists(diary):
        what = f"there is no {DIARY} in it" if path.is_dir() else "there is no such file"
        raise RecordError(f"{path} holds no training record: {what}")
    return directory, diary


def _open_metrics(directory: Path | None) -> tuple[Any, str | None]:
    """The open metrics file, or None and why there is none."""
    if directory is None:
        return None, None
    try:
        return open_regular(directory / METRICS), None
    except NotRegularError as exc:
        return None, str(exc)
    except FileNotFoundError:
        return None, "is missing"
    except OSError as exc:
        return None, f"cannot be read: {exc.strerror}"


_LABELS = {
    "parse": "JSON lines",
    "genesis": "genesis link",
    "chain": "hash chain",
    "seq": "sequence numbers",
    "bookends": "run_start / run_end",
    "schema": "event schema",
    "metrics": "metrics hash",
    "seal": "seal (record.json)",
    "signature": "signature (record.sig)",
}


def _unreadable(why: str) -> list[Check]:
    checks = [Check(n, _LABELS[n], SKIPPED, "the diary was not read") for n in FORMAT_CHECKS]
    checks[0] = Check("parse", _LABELS["parse"], FAIL, f"{DIARY} {why}: it was not read")
    return checks


def _check_previous(  # noqa: PLR0911 - one line for each outcome
    directory: Path | None, diary: Diary, segments: int
) -> Check:
    """Follow ``previous_head`` to the record this one goes on from, or replaced."""
    label = "previous record"
    head, name = diary.first.get("previous_head"), diary.first.get("previous_directory")
    if head is None:
        return Check("previous", label, ABSENT, "the first record of its directory")
    if directory is None or not isinstance(name, str) or "/" in name or name in {"", ".", ".."}:
        return Check("previous", label, ABSENT, "run_start does not say where it is")
    # A record that was set aside itself has its predecessor beside it, not inside.
    places = [place / name for place in (directory, directory.parent)]
    # A link could lead back here.
    place = next((p for p in places if os.path.lexists(p / DIARY) and not p.is_symlink()), None)
    if place is None:
        return Check("previous", label, ABSENT, f"{name} is not there")
    if segments == 0:
        return Check("previous", label, SKIPPED, f"not followed beyond {_MAX_SEGMENTS} records")
    found = _verify(place, None, strict=False, anchors=None, segments=segments - 1)
    if found.head != head:
        text = f"{name} does not end in the head that run_start names: it was changed or cut"
        return Check("previous", label, FAIL, text)
    if not found.ok and "segment" in diary.first:
        bad = ", ".join(check.name for check in found.checks if check.status == FAIL)
        return Check("previous", label, FAIL, f"{name} fails {bad}")
    return Check("previous", label, PASS, f"{name} ends in the head that run_start names")
