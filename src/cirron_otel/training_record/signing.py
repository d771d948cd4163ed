"""Ed25519 keys and signatures of a record. The only file that knows ``cryptography``.

A key may lie in a file, in an environment variable, or where only an external command gets at it
(a KMS, a smart card): whatever signs is a :class:`Signer`. Without ``cryptography`` what needs it
raises :class:`~cirron_otel.errors.CirronDependencyError`. Any thread may call these functions.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import importlib
import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cirron_otel.errors import CirronDependencyError, RecordKeyError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

ALGORITHM = "Ed25519"
#: Environment variables: a private key as PEM text, and the passphrase of a private key.
KEY_VARIABLE = "CIRRON_OTEL_SIGNING_KEY"
PASSPHRASE_VARIABLE = "CIRRON_OTEL_SIGNING_PASSPHRASE"  # noqa: S105 - a name
KEY_BYTES = 32
SIGNATURE_BYTES = 64
_COMMAND_TIMEOUT_S = 60.0
_MAX_ANSWER = 4096
_MAX_PEM = 64 * 1024

#: Gives the passphrase of an encrypted key, or None where there is none.
Passphrase = str | Callable[[], str | None] | None


class Signer(Protocol):
    """What makes a signature."""

    @property
    def public_key(self) -> bytes:
        """The raw public key, 32 bytes."""

    def sign(self, data: bytes) -> bytes:
        """The signature of ``data``, 64 bytes. Raises :class:`RecordKeyError`."""


def fingerprint(public_key: bytes) -> str:
    """How a public key (raw, 32 bytes) is named in a seal: its SHA-256 in hex."""
    return sha256(public_key).hexdigest()


def verify_signature(public_key: bytes, data: bytes, signature: bytes) -> bool:
    """Whether ``signature`` is that of ``data`` by the owner of ``public_key`` (raw, 32 bytes).

    Raises :class:`~cirron_otel.errors.RecordKeyError` when that is no Ed25519 key.
    """
    asymmetric, exceptions = _ed25519(), _library("cryptography.exceptions")
    try:
        key = asymmetric.Ed25519PublicKey.from_public_bytes(public_key)
    except ValueError as exc:
        raise RecordKeyError("that is no Ed25519 public key: it has 32 bytes") from exc
    try:
        key.verify(signature, data)
    except exceptions.InvalidSignature:
        return False
    return True


# --- public keys ----------------------------------------------------------------------------------


def load_public_key(source: str | Path | bytes) -> bytes:
    """The raw 32 bytes of a public key: from a PEM file, PEM bytes, or raw bytes as they are.

    Raises :class:`~cirron_otel.errors.RecordKeyError` when it is no Ed25519 public key.
    """
    data = source if isinstance(source, bytes) else _read(Path(source))
    if len(data) == KEY_BYTES and not data.startswith(b"-----"):
        return data
    where = "the public key" if isinstance(source, bytes) else str(source)
    serialization = _library("cryptography.hazmat.primitives.serialization")
    try:
        key = serialization.load_pem_public_key(data)
    except Exception as exc:  # cryptography raises its own kinds for other key types
        hint = "; that is a private key" if b"PRIVATE KEY" in data else ""
        raise RecordKeyError(f"{where} is no public key in PEM form{hint}") from exc
    if not isinstance(key, _ed25519().Ed25519PublicKey):
        raise RecordKeyError(f"{where} is no Ed25519 key")
    return _raw(key)


# --- signers --------------------------------------------------------------------------------------


class KeySigner:
    """A private key in memory."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key = _raw(key.public_key())

    def __repr__(self) -> str:
        return f"KeySigner({fingerprint(self.public_key)[:16]}...)"

    def sign(self, data: bytes) -> bytes:
        """The signature of ``data``."""
        return self._key.sign(data)


class CommandSigner:
    """An external command that signs: the data on its stdin, the signature on its stdout.

    ``command`` is a list of arguments, or a text that is split like a shell does (no shell runs).
    It answers with the 64 bytes of the signature, raw or in base64, and has a minute for it.
    """

    def __init__(
        self,
        command: str | Sequence[str],
        public_key: str | Path | bytes,
        *,
        timeout_s: float = _COMMAND_TIMEOUT_S,
    ) -> None:
        self.public_key = load_public_key(public_key)
        self._command = shlex.split(command) if isinstance(command, str) else list(command)
        self._timeout_s = timeout_s
        if not self._command:
            raise RecordKeyError("the signing command is empty")

    def sign(self, data: bytes) -> bytes:
        """The signature of ``data``. Blocks until the command has ended."""
        name = self._command[0]
        try:
            done = subprocess.run(  # noqa: S603 - the command is the caller's
                self._command, input=data, capture_output=True, timeout=self._timeout_s, check=False
            )
        except subprocess.TimeoutExpired as exc:
            raise RecordKeyError(f"{name} did not answer within {self._timeout_s:g} s") from exc
        except OSError as exc:
            raise RecordKeyError(f"{name} cannot be run: {exc.strerror}") from exc
        if done.returncode != 0:
            said = done.stderr.decode("utf-8", "replace").strip()[-_MAX_ANSWER:]
            raise RecordKeyError(f"{name} ended with {done.returncode}: {said}")
        return _signature(done.stdout, name)


def _signature(answer: bytes, name: str) -> bytes:
    if len(answer) == SIGNATURE_BYTES:
        return answer
    with contextlib.suppress(binascii.Error, ValueError):
        text = b"".join(answer[:_MAX_ANSWER].split())
        found = base64.b64decode(
            text, altchars=b"-_" if {*b"-_"} & {*text} else None, validate=True
        )
        if len(found) == SIGNATURE_BYTES:
            return found
    raise RecordKeyError(
        f"{name} answered {len(answer)} bytes; a signature is 64 bytes, raw or in base64"
    )


def load_private_key(path: str | Path, passphrase: Passphrase = None) -> KeySigner:
    """A signer from a PEM file (PKCS#8).

    For an encrypted key the passphrase is taken from the argument (a text, or a function that asks
    for it), else from ``CIRRON_OTEL_SIGNING_PASSPHRASE``. Raises
    :class:`~cirron_otel.errors.RecordKeyError`.
    """
    return _private(_read(Path(path)), str(path), passphrase)


def private_key_from_environment(
    variable: str = KEY_VARIABLE, passphrase: Passphrase = None
) -> KeySigner:
    r"""A signer from PEM text in an environment variable, its line ends real or written ``\n``.

    Otherwise as :func:`load_private_key`.
    """
    text = os.environ.get(variable)
    if not text:
        raise RecordKeyError(f"{variable} is not set: it should hold a private key as PEM text")
    return _private(text.replace("\\n", "\n").encode(), variable, passphrase)


def _private(data: bytes, where: str, passphrase: Passphrase) -> KeySigner:
    serialization = _library("cryptography.hazmat.primitives.serialization")
    secret: bytes | None = None
    if b"ENCRYPTED" in data:
        secret = _passphrase(passphrase, where)
    try:
        key = serialization.load_pem_private_key(data, secret)
    except Exception as exc:  # cryptography raises its own kinds for other key types
        if secret is not None:
            raise RecordKeyError(f"{where} cannot be opened: the passphrase is wrong") from exc
        hint = "; that is a public key" if b"PUBLIC KEY" in data else ""
        raise RecordKeyError(f"{where} is no private key in PEM form{hint}") from exc
    if not isinstance(key, _ed25519().Ed25519PrivateKey):
        raise RecordKeyError(f"{where} is no Ed25519 key")
    return KeySigner(key)


def _passphrase(given: Passphrase, where: str) -> bytes:
    text = given() if callable(given) else given
    text = os.environ.get(PASSPHRASE_VARIABLE) if text is None else text
    if not text:
        raise RecordKeyError(
            f"{where} is encrypted: give its passphrase, or set {PASSPHRASE_VARIABLE}"
        )
    return text.encode()


# --- making keys ----------------------------------------------------------------------------------


def keygen(private_path: str | Path, public_path: str | Path, passphrase: str | None = None) -> str:
    """Make a pair of keys and return the public key's fingerprint.

    The private key (PEM PKCS#8, mode 0600) is encrypted where a passphrase is given; the public
    one is PEM SubjectPublicKeyInfo, mode 0644. Raises
    :class:`~cirron_otel.errors.RecordKeyError` where either path exists, as whatever, or cannot be
    written; then neither file is left.
    """
    private, public = Path(private_path), Path(public_path)
    if private.absolute() == public.absolute():
        raise RecordKeyError("the private and the public key cannot be one file")
    for path in (private, public):
        if os.path.lexists(path):
            raise RecordKeyError(f"{path} exists: a key is never overwritten; give another name")
    serialization = _library("cryptography.hazmat.primitives.serialization")
    key = _ed25519().Ed25519PrivateKey.generate()
    protection = (
        serialization.BestAvailableEncryption(passphrase.encode())
        if passphrase
        else serialization.NoEncryption()
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, protection
    )
    shown = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    _write_new(private, secret, 0o600)
    try:
        _write_new(public, shown, 0o644)
    except BaseException:
        private.unlink(missing_ok=True)
        raise
    return fingerprint(_raw(key.public_key()))


def _write_new(path: Path, data: bytes, mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, mode)
        try:
            with os.fdopen(fd, "wb") as file:
                os.fchmod(file.fileno(), mode)  # whatever the umask is
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    except OSError as exc:
        raise RecordKeyError(f"cannot write {path}: {exc.strerror}") from exc


# --- the library ----------------------------------------------------------------------------------


def _raw(key: Ed25519PublicKey) -> bytes:
    return key.public_bytes_raw()


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_PEM)
    except (OSError, ValueError) as exc:
        raise RecordKeyError(f"cannot read {path}: {getattr(exc, 'strerror', exc)}") from exc


def _ed25519() -> Any:  # noqa: ANN401 - a module
    return _library("cryptography.hazmat.primitives.asymmetric.ed25519")


def _library(name: str) -> Any:  # noqa: ANN401 - a module
    """Loaded at first use: a record is read and verified by its chain without it."""
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise CirronDependencyError(
            "signatures need cryptography: pip install 'cirron-otel[record]'"
        ) from exc
