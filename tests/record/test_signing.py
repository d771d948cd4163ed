"""Keys and signatures: made, kept, checked by ourselves and by OpenSSL."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

from cirron_otel.errors import CirronDependencyError, RecordError, RecordKeyError
from cirron_otel.training_record import signing
from cirron_otel.training_record.checking.verify import verify
from cirron_otel.training_record.seal import seal, sign
from cirron_otel.training_record.signing import (
    CommandSigner,
    fingerprint,
    keygen,
    load_private_key,
    load_public_key,
    private_key_from_environment,
    verify_signature,
)
from cirron_otel.training_record.writing.journal import Journal
from helpers import RunProgram
from journal_records import START

OPENSSL = shutil.which("openssl")
SECRET = "open sesame \u00fc"  # noqa: S105 - of a key that this test makes


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished record."""
    with Journal(tmp_path / "run", run_start=START) as journal:
        journal.check(3, 1.0, {"conv1": 0.5}, {"conv1": [0, 0, 0, 0]})
    return tmp_path / "run"


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """A private and a public key."""
    keygen(tmp_path / "key.pem", tmp_path / "key.pub.pem")
    return tmp_path / "key.pem", tmp_path / "key.pub.pem"


def test_sign_and_verify(run: Path, keys: tuple[Path, Path]) -> None:
    """A signed record passes all nine checks with its key, and fails with another."""
    private, public = keys
    content = sign(run, load_private_key(private))
    raw = load_public_key(public)
    assert content["signer"] == {
        "algorithm": "Ed25519",
        "public_key_sha256": hashlib.sha256(raw).hexdigest(),
    }
    signature = (run / "record.sig").read_bytes()
    assert len(signature) == 64
    assert verify_signature(raw, (run / "record.json").read_bytes(), signature)
    assert not verify_signature(raw, b"something else", signature)
    assert verify(run, key=public, strict=True).complete
    keygen(private.with_name("b"), private.with_name("b.pub"))
    assert verify(run, key=private.with_name("b.pub")).check("signature").status == "fail"
    assert sorted(path.name for path in run.iterdir()) == [
        "diary.jsonl", "metrics.jsonl", "record.json", "record.sig",
    ]  # fmt: skip


@pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed")
def test_openssl_checks_our_signature(run: Path, keys: tuple[Path, Path]) -> None:
    """OpenSSL confirms the signature over record.json, and refuses it over anything else."""
    sign(run, load_private_key(keys[0]))

    def check(data: Path) -> int:
        command = [str(OPENSSL), "pkeyutl", "-verify", "-pubin", "-inkey", str(keys[1]), "-rawin"]
        files = ["-in", str(data), "-sigfile", str(run / "record.sig")]
        return subprocess.run([*command, *files], capture_output=True, check=False).returncode

    assert check(run / "record.json") == 0
    assert check(run / "diary.jsonl") != 0


@pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed")
def test_keys_of_openssl(run: Path, tmp_path: Path) -> None:
    """Keys that OpenSSL made sign and verify here."""
    private, public = tmp_path / "o.pem", tmp_path / "o.pub"
    for arguments in (
        ["genpkey", "-algorithm", "ed25519", "-out", str(private)],
        ["pkey", "-in", str(private), "-pubout", "-out", str(public)],
    ):
        subprocess.run([str(OPENSSL), *arguments], check=True, capture_output=True)
    sign(run, load_private_key(private))
    assert verify(run, key=public, strict=True).complete


def test_signing_anew(run: Path, keys: tuple[Path, Path]) -> None:
    """An intact record may be signed again, by another key too, and after a seal."""
    seal(run)
    sign(run, load_private_key(keys[0]))
    other = keys[0].with_name("other")
    keygen(other, keys[0].with_name("other.pub"))
    sign(run, load_private_key(other))
    assert verify(run, key=keys[0].with_name("other.pub")).complete
    (run / "record.sig").unlink()
    sign(run, load_private_key(keys[0]))
    assert verify(run, key=keys[1]).complete
    data = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(data + b"\n")
    with pytest.raises(RecordError, match="metrics"):
        sign(run, load_private_key(keys[0]))


def test_the_key_files(tmp_path: Path) -> None:
    """PKCS#8 and SubjectPublicKeyInfo, 0600 and 0644 whatever the umask, and the fingerprint."""
    private, public = tmp_path / "a", tmp_path / "a.pub"
    before = os.umask(0o277)
    try:
        name = keygen(private, public)
    finally:
        os.umask(before)
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert stat.S_IMODE(public.stat().st_mode) == 0o644
    assert private.read_text().startswith("-----BEGIN PRIVATE KEY-----")
    assert public.read_text().startswith("-----BEGIN PUBLIC KEY-----")
    assert name == fingerprint(load_public_key(public))
    assert load_private_key(private).public_key == load_public_key(public)


def test_keygen_overwrites_nothing(tmp_path: Path) -> None:
    """Neither a file nor a dangling link, nor one file for both; no half of a pair is left."""
    (tmp_path / "there").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    new = tmp_path / "new"
    for private, public in (
        (tmp_path / "there", new),
        (new, tmp_path / "there"),
        (tmp_path / "link", new),
        (new, tmp_path / "link"),
        (new, new),
        (new, tmp_path / "no" / "directory"),
    ):
        with pytest.raises(RecordKeyError):
            keygen(private, public)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "there"]
    assert (tmp_path / "there").read_text() == "mine"


def test_encrypted_keys(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The passphrase comes from the argument, from a function that asks, or the environment."""
    private, public = tmp_path / "e", tmp_path / "e.pub"
    keygen(private, public, passphrase=SECRET)
    assert "ENCRYPTED" in private.read_text()
    for bad in (None, "", "wrong", lambda: None, lambda: "wrong"):
        with pytest.raises(RecordKeyError, match=r"encrypted|wrong"):
            load_private_key(private, bad)
    assert load_private_key(private, SECRET).public_key == load_public_key(public)
    asked: list[int] = []

    def ask() -> str:
        asked.append(1)
        return SECRET

    sign(run, load_private_key(private, ask))
    assert asked == [1]
    assert verify(run, key=public).complete
    monkeypatch.setenv("CIRRON_OTEL_SIGNING_PASSPHRASE", SECRET)
    assert load_private_key(private).public_key == load_public_key(public)
    plain, plain_public = tmp_path / "p", tmp_path / "p.pub"
    keygen(plain, plain_public)
    load_private_key(plain, ask)
    assert asked == [1], "nobody is asked for a key that is not encrypted"


def test_a_key_from_the_environment(
    keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEM text in a variable, as it is or with its line ends written out."""
    with pytest.raises(RecordKeyError, match="CIRRON_OTEL_SIGNING_KEY is not set"):
        private_key_from_environment()
    text = keys[0].read_text()
    for value in (text, text.replace("\n", "\\n"), text.strip()):
        monkeypatch.setenv("CIRRON_OTEL_SIGNING_KEY", value)
        assert private_key_from_environment().public_key == load_public_key(keys[1])
    monkeypatch.setenv("MINE", "nonsense")
    with pytest.raises(RecordKeyError, match="MINE is no private key"):
        private_key_from_environment("MINE")


COMMAND = """
import base64, sys
from cryptography.hazmat.primitives import serialization
key = serialization.load_pem_private_key(open(sys.argv[1], "rb").read(), None)
signature = key.sign(sys.stdin.buffer.read())
how = sys.argv[2]
if how == "base64":
    signature = base64.encodebytes(signature)
elif how == "urlsafe":
    signature = base64.urlsafe_b64encode(signature)
elif how == "short":
    signature = signature[:63]
elif how == "other":
    signature = key.sign(b"something else")
elif how == "fail":
    sys.exit("the vault is sealed")
elif how == "hang":
    import time
    time.sleep(30)
sys.stdout.buffer.write(signature)
"""


@pytest.mark.parametrize("how", ["raw", "base64", "urlsafe"])
def test_a_command_that_signs(run: Path, keys: tuple[Path, Path], tmp_path: Path, how: str) -> None:
    """It gets record.json on stdin and answers with the signature, raw or in base64."""
    (tmp_path / "kms.py").write_text(COMMAND)
    command = [sys.executable, str(tmp_path / "kms.py"), str(keys[0]), how]
    sign(run, CommandSigner(command if how == "raw" else " ".join(command), keys[1]))
    assert verify(run, key=keys[1]).complete


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("short", "answered 63 bytes"),
        ("other", "not a pair"),
        ("fail", "ended with 1: the vault is sealed"),
        ("hang", "did not answer within 0.5 s"),
    ],
)
def test_a_command_that_does_not_sign(
    run: Path, keys: tuple[Path, Path], tmp_path: Path, how: str, message: str
) -> None:
    """What it did is said, and nothing is written."""
    (tmp_path / "kms.py").write_text(COMMAND)
    command = [sys.executable, str(tmp_path / "kms.py"), str(keys[0]), how]
    signer = CommandSigner(command, keys[1], timeout_s=0.5 if how == "hang" else 50)
    with pytest.raises(RecordKeyError, match=message):
        sign(run, signer)
    assert sorted(path.name for path in run.iterdir()) == ["diary.jsonl", "metrics.jsonl"]


def test_a_command_that_is_not_there(run: Path, keys: tuple[Path, Path]) -> None:
    """A missing program, and no program at all."""
    with pytest.raises(RecordKeyError, match="cannot be run"):
        sign(run, CommandSigner("/nonexistent/kms --sign", keys[1]))
    with pytest.raises(RecordKeyError, match="is empty"):
        CommandSigner("", keys[1])


def test_keys_of_the_wrong_kind(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    """Another algorithm, the other half of the pair, rubbish, nothing: each with a clear word."""
    other = rsa.generate_private_key(65537, 2048)
    pem = serialization.Encoding.PEM
    (tmp_path / "rsa").write_bytes(
        other.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    (tmp_path / "rsa.pub").write_bytes(
        other.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    (tmp_path / "rubbish").write_bytes(b"\xff" * 100)
    with pytest.raises(RecordKeyError, match="no Ed25519 key"):
        load_private_key(tmp_path / "rsa")
    with pytest.raises(RecordKeyError, match="no Ed25519 key"):
        load_public_key(tmp_path / "rsa.pub")
    with pytest.raises(RecordKeyError, match="that is a public key"):
        load_private_key(keys[1])
    with pytest.raises(RecordKeyError, match="that is a private key"):
        load_public_key(keys[0])
    for load in (load_private_key, load_public_key):
        with pytest.raises(RecordKeyError, match="PEM form"):
            load(tmp_path / "rubbish")
        with pytest.raises(RecordKeyError, match="cannot read"):
            load(tmp_path / "none")
        with pytest.raises(RecordKeyError, match="cannot read"):
            load(tmp_path)
    with pytest.raises(RecordKeyError, match="32 bytes"):
        verify_signature(b"short", b"", b"x" * 64)
    assert not verify_signature(load_public_key(keys[1]), b"", b"short")


def test_raw_public_keys(keys: tuple[Path, Path]) -> None:
    """Raw bytes are taken as they are, PEM bytes are read."""
    raw = load_public_key(keys[1])
    assert load_public_key(raw) == raw == load_public_key(keys[1].read_bytes())
    ed25519.Ed25519PublicKey.from_public_bytes(raw)


def test_the_known_record_and_key() -> None:
    """RFC 8032, test 2: the scheme is plain Ed25519 over the bytes."""
    public = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
    signature = bytes.fromhex(
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    assert verify_signature(public, b"\x72", signature)


def test_a_secret_is_never_shown(keys: tuple[Path, Path]) -> None:
    """A signer's repr names the public key only."""
    signer = load_private_key(keys[0])
    assert repr(signer) == f"KeySigner({fingerprint(signer.public_key)[:16]}...)"
    secret = base64.b64decode("".join(keys[0].read_text().splitlines()[1:-1]))[-32:]
    assert secret.hex() not in repr(vars(signer))


def test_without_the_library(run_program: RunProgram) -> None:
    """Where cryptography is not installed the error says what to install."""
    done = run_program(
        """
import sys
sys.modules["cryptography"] = None
from cirron_otel.training_record import signing
try:
    signing.verify_signature(b"x" * 32, b"", b"x" * 64)
except Exception as error:
    print(type(error).__name__, error)
"""
    )
    assert done.stdout.startswith(CirronDependencyError.__name__)
    assert "pip install 'cirron-otel[record]'" in done.stdout
    assert "cryptography" in signing.__doc__  # type: ignore[operator]
