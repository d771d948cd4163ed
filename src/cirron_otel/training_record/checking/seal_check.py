"""Checking ``record.json`` and ``record.sig`` against the files they are about."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from cirron_otel.training_record.canonical import canonical
from cirron_otel.training_record.chain import DIARY, METRICS, SEAL, SIGNATURE
from cirron_otel.training_record.checking.findings import (
    ABSENT,
    FAIL,
    PASS,
    UNCHECKED,
    Check,
    shown,
    shown_hash,
)
from cirron_otel.training_record.checking.reader import NotRegularError, open_regular

SEAL_FORMAT = "ormas-monitor-record"
_LABEL = f"seal ({SEAL})"
_MAX_SEAL = 1024 * 1024
_SIGNATURE_SIZE = 64
_SHOWN_PROBLEMS = 5
_CREATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ").fullmatch


class PublicKey(NamedTuple):
    """A key to check a signature with: its raw bytes, and (data, signature) to whether they fit."""

    raw: bytes
    fits: Callable[[bytes, bytes], bool]


class Known(NamedTuple):
    """What the diary and the metrics turned out to be."""

    head: str | None
    events: int
    record_version: object
    #: SHA-256 of files that were read already, by name.
    digests: Mapping[str, str]


class Seal(NamedTuple):
    """A seal as far as it can be read. ``raw`` is what a signature is over."""

    check: Check
    #: What the first verifier of this format does not look at.
    details: list[str]
    raw: bytes | None = None
    #: None where the seal cannot be read; ``{}`` where it names no signer.
    signer: Mapping[str, Any] | None = None


def check_seal(  # noqa: PLR0911 - a line for each way in which there is none
    directory: Path | None, known: Known
) -> Seal:
    """Hold ``record.json`` against the files. Blocks for as long as reading them takes."""
    if directory is None:
        return _no_seal(ABSENT, "only a diary was given: no seal to check")
    path = directory / SEAL
    if not os.path.lexists(path):
        text = (
            f"not sealed: there is no {SEAL}; lines cut from the end show only as a missing "
            "run_end. `cirron-otel record sign` seals the record"
        )
        return _no_seal(ABSENT, text)
    try:
        with open_regular(path) as file:
            raw = file.read(_MAX_SEAL + 1)
    except NotRegularError as exc:
        return _no_seal(FAIL, f"{SEAL} {exc}")
    except OSError as exc:
        return _no_seal(FAIL, f"{SEAL} cannot be read: {exc.strerror}")
    if len(raw) > _MAX_SEAL:
        return _no_seal(FAIL, f"{SEAL} is larger than 1 MiB")
    seal = _loaded(raw)
    if seal is None:
        return _no_seal(FAIL, f"{SEAL} is no JSON object")
    wrong = _problems(directory, seal, raw, known)
    if wrong:
        more = len(wrong) - _SHOWN_PROBLEMS
        text = "; ".join(wrong[:_SHOWN_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
    else:
        text = f"{known.events} events and {len(seal['files'])} files are as they were sealed"
    signer = seal.get("signer")
    return Seal(
        Check("seal", _LABEL, FAIL if wrong else PASS, text),
        _details(seal, known),
        raw,
        signer if isinstance(signer, dict) else {},
    )


def _no_seal(status: str, text: str) -> Seal:
    return Seal(Check("seal", _LABEL, status, text), [])


def _loaded(raw: bytes) -> dict[str, Any] | None:
    try:
        seal = json.loads(raw.decode())
    except (ValueError, RecursionError):
        return None
    return seal if isinstance(seal, dict) else None


def _problems(directory: Path, seal: Mapping[str, Any], raw: bytes, known: Known) -> list[str]:
    wrong: list[str] = []
    try:
        if canonical(seal).encode("ascii") != raw:
            wrong.append("its bytes are not the canonical form of its content")
    except (ValueError, RecursionError):
        wrong.append("its content has no canonical form")
    if seal.get("format") != SEAL_FORMAT:
        wrong.append(f"format is {shown(seal.get('format'))}, not {SEAL_FORMAT}")
    files = seal.get("files")
    if isinstance(files, dict):
        wrong += [f"{name} is not listed" for name in (DIARY, METRICS) if name not in files]
        for name, digest in files.items():
            problem = _file_problem(directory, name, digest, known.digests)
            if problem is not None:
                wrong.append(f"{shown(name)} {problem}")
    else:
        wrong.append("files is no object")
    if seal.get("diary_head") != known.head:
        wrong.append(
            f"it was sealed at head {shown_hash(seal.get('diary_head'))}, the diary ends in "
            f"{shown_hash(known.head)}"
        )
    events = seal.get("events")
    if type(events) is not int or events != known.events:
        wrong.append(f"it was sealed with {shown(events)} events, the diary has {known.events}")
    return wrong


def _file_problem(
    directory: Path, name: str, digest: object, digests: Mapping[str, str]
) -> str | None:
    if not name or name in {".", ".."} or any(c in name for c in ("/", "\\", "\0")):
        return "is no bare file name"
    found = digests.get(name)
    if found is None:
        try:
            found = file_sha256(directory / name)
        except FileNotFoundError:
            return "is missing"
        except NotRegularError as exc:
            return str(exc)
        except (OSError, ValueError) as exc:
            return f"cannot be read ({shown(exc)})"
    return None if found == digest else "was changed after it had been sealed"


def file_sha256(path: Path) -> str:
    """SHA-256 of a regular file. Raises ``OSError`` and :class:`NotRegularError`; blocks."""
    digest = sha256()
    with open_regular(path) as file:
        while chunk := file.read(1024 * 1024):
            digest.update(chunk)
    return digest.hexdigest()


def _details(seal: Mapping[str, Any], known: Known) -> list[str]:
    wrong = []
    if seal.get("record_version") != known.record_version:
        wrong.append(
            f"record_version is {shown(seal.get('record_version'))} in the seal and "
            f"{shown(known.record_version)} in run_start"
        )
    created = seal.get("created")
    if not isinstance(created, str) or not _CREATED(created):
        wrong.append("created is no time in UTC")
    signer = seal.get("signer")
    if isinstance(signer, dict) and signer.get("algorithm") != "Ed25519":
        wrong.append(f"the signer's algorithm is {shown(signer.get('algorithm'))}, not Ed25519")
    return wrong


def check_signature(directory: Path | None, seal: Seal, key: PublicKey | None) -> Check:
    """Check ``record.sig`` with a raw public key, or say that it is there.

    A key that was given means that a signature is wanted: none is then a failure.
    """
    status, text = _signature(directory, seal, key)
    return Check("signature", f"signature ({SIGNATURE})", status, text)


def _signature(  # noqa: PLR0911 - one line for each way in which there is none
    directory: Path | None, seal: Seal, key: PublicKey | None
) -> tuple[str, str]:
    wanted = "a key was given, and there is no signature to check with it"
    if directory is None:
        if key is not None:
            return FAIL, f"{wanted}: only a diary was given"
        return ABSENT, "only a diary was given: no signature to check"
    path = directory / SIGNATURE
    if not os.path.lexists(path):
        if seal.signer:
            return FAIL, f"the seal names a signer, and there is no {SIGNATURE}"
        return (FAIL, wanted) if key is not None else (ABSENT, f"not signed: no {SIGNATURE}")
    try:
        with open_regular(path) as file:
            signature = file.read(_SIGNATURE_SIZE + 1)
    except NotRegularError as exc:
        return FAIL, f"{SIGNATURE} {exc}"
    except OSError as exc:
        return FAIL, f"{SIGNATURE} cannot be read: {exc.strerror}"
    return _fits(signature, seal, key)


def _fits(signature: bytes, seal: Seal, key: PublicKey | None) -> tuple[str, str]:
    if seal.raw is None or seal.signer is None:
        return FAIL, f"there is a {SIGNATURE}, but no seal that it could be over"
    if len(signature) != _SIGNATURE_SIZE:
        return FAIL, f"{SIGNATURE} is not {_SIGNATURE_SIZE} bytes long"
    claimed = seal.signer.get("public_key_sha256")
    if key is None:
        return UNCHECKED, (
            f"signed, as the seal says by the key with SHA-256 {shown_hash(claimed)}; give the "
            "public key to check it"
        )
    fingerprint = sha256(key.raw).hexdigest()
    if claimed != fingerprint:
        return FAIL, (
            f"the seal names the key {shown_hash(claimed)}, the key given is "
            f"{shown_hash(fingerprint)}"
        )
    if not key.fits(seal.raw, signature):
        return FAIL, "the signature is not over this seal by this key"
    return PASS, f"signed by the key {shown_hash(fingerprint)}"
