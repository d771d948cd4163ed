"""Both ways between this package and the existing monitor, the real one, in its own environment.

``make interop`` installs it and runs this; ``CIRRON_OTEL_TEST_PEER`` names its Python.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from cirron_otel.training_record.checking.verify import FORMAT_CHECKS, verify
from cirron_otel.training_record.seal import sign
from cirron_otel.training_record.signing import keygen, load_private_key
from record import peer_programs
from record.tampering import RECORDS, TAMPERED
from record.writing import write

PEER = Path(os.environ["CIRRON_OTEL_TEST_PEER"])
KEY = RECORDS / "signed" / "signer.pub.pem"
#: A type that readers must pass over fails there (R-W12).
MILDER = {"unknown_event": {"schema"}}


def peer(program: str, *arguments: str | Path, given: str = "") -> str:
    """Run a program in the peer's environment; what it printed."""
    done = subprocess.run(
        [PEER, "-c", program, *map(str, arguments)],
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the peer's own command."""
    return subprocess.run(
        [PEER.with_name("ormas-monitor"), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def peer_verdicts(records: Sequence[tuple[Path, Path | None]]) -> list[dict[str, str]]:
    """Check to status, for each record, as the peer finds them."""
    given = json.dumps([[str(path), None if key is None else str(key)] for path, key in records])
    found: list[dict[str, str]] = json.loads(peer(peer_programs.VERIFY, given=given))
    return found


def our_nine(path: Path, key: Path | None = None) -> dict[str, str]:
    """Check to status, for the nine checks of the format."""
    return {c.name: c.status for c in verify(path, key=key).checks if c.name in FORMAT_CHECKS}


def test_the_peer_is_there() -> None:
    """The environment has the very version the format was taken from."""
    assert command("--version").stdout.split()[-1] == "0.2.3"


@pytest.mark.timeout(300)
def test_our_signed_record_passes_all_nine_checks_there(tmp_path: Path) -> None:
    """What we write, seal and sign passes the peer's strict verification with the key."""
    run = tmp_path / "run"
    write(run)
    keygen(tmp_path / "key.pem", tmp_path / "key.pub.pem")
    sign(run, load_private_key(tmp_path / "key.pem"))
    done = command("verify", run, "--strict", "--json", "--key", tmp_path / "key.pub.pem")
    verdict = json.loads(done.stdout)
    assert done.returncode == 0, verdict
    assert [check["status"] for check in verdict["checks"]] == ["pass"] * 9
    assert verify(run, key=tmp_path / "key.pub.pem", strict=True).passed


@pytest.mark.timeout(600)
def test_every_tampered_record_gets_the_same_nine_verdicts(tmp_path: Path) -> None:
    """Where the peer fails a record, we do, in the same checks; our own checks come on top."""
    names = sorted(path.name for path in TAMPERED.iterdir())
    runs = []
    for name in names:
        run = Path(shutil.copytree(TAMPERED / name, tmp_path / name))
        crime = json.loads((run / "expected.json").read_text())
        runs.append((run, KEY if crime["record"] == "signed" else None))
    for name, (run, key), theirs in zip(names, runs, peer_verdicts(runs), strict=True):
        ours = our_nine(run, key)
        differing = {check for check in ours if ours[check] != theirs[check]}
        assert differing == MILDER.get(name, set()), (name, ours, theirs)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(8))
def test_what_the_peer_writes_verifies_and_replays_here(tmp_path: Path, seed: int) -> None:
    """A run in which anything happens has the same nine verdicts, and replays to the last bit."""
    run = tmp_path / "run"
    peer(peer_programs.TRAIN, run, str(seed))
    (theirs,) = peer_verdicts([(run, None)])
    assert our_nine(run) == theirs
    verdict = verify(run)
    assert verdict.ok, [check for check in verdict.checks if check.status == "fail"]
    replay = verdict.check("replay")
    assert replay.status == "pass"
    assert "to the last bit" in replay.message


@pytest.mark.timeout(300)
def test_the_peers_signature_is_checked_here(tmp_path: Path) -> None:
    """A record the peer signed with a key of its own passes our strict verification."""
    run = tmp_path / "run"
    peer(peer_programs.TRAIN, run, "3")
    key, public = tmp_path / "k.pem", tmp_path / "k.pub.pem"
    assert command("keygen", "--private", key, "--public", public).returncode == 0
    assert command("sign", run, "--key", key).returncode == 0
    assert verify(run, key=public, strict=True).passed
