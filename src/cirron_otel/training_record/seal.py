"""Sealing and signing a finished record: ``record.json`` binds its files together.

A seal shows lines cut from the end and bytes changed anywhere, as long as nobody makes a new one;
only a signature (:mod:`~cirron_otel.training_record.signing`) shows that.
"""

from __future__ import annotations

import datetime as dt
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cirron_otel.errors import RecordError, RecordKeyError
from cirron_otel.training_record.canonical import canonical
from cirron_otel.training_record.chain import DIARY, METRICS, SEAL, SIGNATURE
from cirron_otel.training_record.checking.findings import ABSENT, FAIL
from cirron_otel.training_record.checking.seal_check import SEAL_FORMAT, file_sha256
from cirron_otel.training_record.checking.verdict import FORMAT_CHECKS, verify_files
from cirron_otel.training_record.line_text import TOOL
from cirron_otel.training_record.lock import RecordLock
from cirron_otel.training_record.signing import ALGORITHM, Signer, fingerprint, verify_signature
from cirron_otel.training_record.syncing import sync_directory

_FILES = (DIARY, METRICS)


def seal(directory: str | Path) -> dict[str, Any]:
    """Write ``record.json`` without a signer and return its content.

    Raises :class:`~cirron_otel.errors.RecordError`, having written nothing, when the record is not
    finished or does not verify, when a seal that is there does not fit it, or when it is signed.
    Blocks for as long as verifying takes.
    """
    place = Path(directory)
    with locked(place):
        content, text = make_seal(place, None)
        if os.path.lexists(place / SIGNATURE):
            raise RecordError(
                f"{place} is signed: a new seal would make its signature worthless; sign it again "
                "instead"
            )
        write_staged(place, [(SEAL, text)])
        return content


def sign(directory: str | Path, signer: Signer) -> dict[str, Any]:
    """Seal a finished record in the signer's name and sign the seal; returns the seal's content.

    A record that is signed already is signed anew, also by another key. Raises
    :class:`~cirron_otel.errors.RecordError`, having written nothing, where
    :func:`seal` does (but for a signature that is there), and
    :class:`~cirron_otel.errors.RecordKeyError` when the signer does not make a signature that its
    public key confirms. Blocks for as long as verifying and the signer take.
    """
    place = Path(directory)
    named = {"algorithm": ALGORITHM, "public_key_sha256": fingerprint(signer.public_key)}
    with locked(place):
        content, text = make_seal(place, named)
        signature = signer.sign(text)
        if not verify_signature(signer.public_key, text, signature):
            raise RecordKeyError(
                "the signature does not fit the public key: private and public key are not a pair"
            )
        # The seal first: one without its signature can be signed again, as it fits its files.
        write_staged(place, [(SEAL, text), (SIGNATURE, signature)])
        return content


def locked(place: Path) -> RecordLock:
    """The right to seal the record in ``place``, to be given up by ``with``."""
    if not place.is_dir():
        raise RecordError(f"{place} is no run directory")
    return RecordLock.acquire(place)


def make_seal(place: Path, signer: Mapping[str, str] | None) -> tuple[dict[str, Any], bytes]:
    """The content of a seal and its bytes, for a record that may be sealed.

    Raises :class:`~cirron_otel.errors.RecordError` when it may not.
    """
    for name in (DIARY, METRICS, SEAL, SIGNATURE):
        path = place / name
        if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
            raise RecordError(f"{path} is no regular file")
        if name in _FILES and not path.exists():
            raise RecordError(f"{path} is missing")
    before = _stamps(place)
    verdict = verify_files(place)
    for check in verdict.checks:
        if check.name == "signature":
            continue
        # What need not be there: a seal, and what only our own checks look at.
        optional = check.name == "seal" or check.name not in FORMAT_CHECKS
        if check.status == FAIL or (check.status == ABSENT and not optional):
            raise RecordError(
                f"{place} cannot be sealed: {check.name}: {check.message}"
                + (" (cirron-otel record recover ends it)" if check.name == "bookends" else "")
            )
    try:
        files = {name: file_sha256(place / name) for name in _FILES}
    except OSError as exc:
        raise RecordError(f"cannot read the record in {place}: {exc.strerror}") from exc
    if _stamps(place) != before:
        raise RecordError(f"{place} changed while it was being verified; nothing was sealed")
    version = verdict.record_version
    content = {
        "format": SEAL_FORMAT,
        "record_version": version if type(version) is int else None,
        "tool": TOOL,
        "created": dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "files": files,
        "diary_head": verdict.head,
        "events": verdict.events,
        "signer": None if signer is None else dict(signer),
    }
    return content, canonical(content).encode("ascii")


def write_staged(place: Path, files: Sequence[tuple[str, bytes]]) -> None:
    """Put files into ``place``, each in one step, on the disk when this returns.

    All are written under other names first, so that a full disk changes nothing. Raises
    :class:`~cirron_otel.errors.RecordError`.
    """
    staged: list[tuple[Path, Path]] = []
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        try:
            for name, data in files:
                spare = place / f".{name}.{secrets.token_hex(8)}.tmp"
                with os.fdopen(os.open(spare, flags, 0o666), "wb") as file:
                    staged.append((spare, place / name))
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            for spare, target in staged:
                spare.rename(target)
            sync_directory(place)
        finally:
            for spare, _ in staged:
                spare.unlink(missing_ok=True)
    except OSError as exc:
        raise RecordError(f"cannot write into {place}: {exc.strerror}") from exc


def _stamps(place: Path) -> list[tuple[int, int, int]]:
    found = [(place / name).stat() for name in _FILES]
    return [(one.st_ino, one.st_size, one.st_mtime_ns) for one in found]
