"""Verifying a training record, with a key and anchors where the caller has them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cirron_otel.training_record.checking.anchors import Anchor, load
from cirron_otel.training_record.checking.findings import Check
from cirron_otel.training_record.checking.seal_check import PublicKey
from cirron_otel.training_record.checking.verdict import FORMAT_CHECKS, Verdict, verify_files

__all__ = ["FORMAT_CHECKS", "Check", "Verdict", "verify"]


def verify(
    path: str | Path,
    *,
    key: bytes | str | Path | None = None,
    strict: bool = False,
    anchors: str | Path | Sequence[Anchor] | None = None,
) -> Verdict:
    """Verify the record in a run directory, or a diary on its own.

    ``key`` is an Ed25519 public key, raw (32 bytes) or the path of a PEM file; ``strict`` asks for
    all nine checks to pass, so for a sealed and signed record; ``anchors`` are anchors, or where
    ``load`` in ``checking/anchors.py`` finds them. A key or anchors that were given and find
    nothing to check are a failure.

    Whatever the files hold, the answer is a verdict. Raises
    :class:`~cirron_otel.errors.RecordError` where there is no diary, where the key or the anchors
    cannot be used, and where the disk fails. Any thread; blocks for as long as reading the files
    takes, in constant memory.
    """
    public = None
    if key is not None:
        # Only here: most records are verified without a key, and without what keys need.
        from cirron_otel.training_record.signing import (  # noqa: PLC0415
            load_public_key,
            verify_signature,
        )

        raw = load_public_key(key)
        public = PublicKey(raw, partial(verify_signature, raw))
    known: Sequence[Anchor] | None = None
    if anchors is not None:
        known = load(anchors) if isinstance(anchors, (str, Path)) else anchors
    return verify_files(Path(path), public, strict=strict, anchors=known)
