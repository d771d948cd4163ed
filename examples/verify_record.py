"""A verifier of training records, from docs/formats/training-record-v1.md alone.

    python examples/verify_record.py RUN [PUBLIC_KEY.pem]

It needs nothing of this library: the standard library, and ``cryptography`` where a key is given.
It makes the nine checks of the format and looks for repeated keys, a missing record version and
wrong running digests. Status 0: verified, 1: not verified, 2: there is no record, or no such key.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path

DIARY, METRICS, SEAL, SIGNATURE = "diary.jsonl", "metrics.jsonl", "record.json", "record.sig"
NINE = (
    "parse", "genesis", "chain", "seq", "bookends", "schema", "metrics", "seal", "signature",
)  # fmt: skip
ZEROS = "0" * 64
HASH = re.compile("[0-9a-f]{64}").fullmatch
MAX_SEAL = 1024 * 1024

CHANNELS = (
    "step severity layer batchnorm channels level n_certified n_flat n_observed n_decayed "
    "certified flat observed"
)
REQUIRED = {
    "run_start": "name tool model parameters layers architecture_sha256 optimizer python torch "
    "platform config record_version",
    "structure": "step pairs relu_after",
    "manifest": "step check_every layers producers channel_checks repair precision distributed "
    "notes",
    "alarm": "step severity layer kind diagnosis grad_norm baseline sigma",
    "alarm_cleared": "step layer diagnosis grad_norm baseline",
    "channels": CHANNELS,
    "channels_cleared": CHANNELS,
    "certificate": "step severity layer batchnorm channels count statement assumes",
    "certificate_refused": "step severity layer batchnorm count reason",
    "no_gradients": "step severity message",
    "loss_reduced": "step severity elements",
    "repair": "step severity layer batchnorm channels count method optimizer_slices_reset "
    "modification_class bound delta_norm weight_norm_before weight_norm_after relative_change rng",
    "loss_spike": "step severity value baseline",
    "loss_recovered": "step value baseline",
    "nonfinite_loss": "step severity value",
    "nonfinite_gradient": "step severity layers",
    "skipped_step": "step severity scale layers",
    "sink_error": "sink error",
    "run_end": "steps checks counts metrics_sha256",
}
FIXED = {
    "run_start": {"record_version": 1},
    "alarm": {"severity": "warning"},
    "certificate": {"severity": "proof"},
    "certificate_refused": {"severity": "info"},
    "no_gradients": {"severity": "warning"},
    "loss_reduced": {"severity": "info"},
    "repair": {"severity": "action", "modification_class": "discrete", "bound": None},
    "loss_spike": {"severity": "warning"},
    "nonfinite_loss": {"severity": "critical"},
    "nonfinite_gradient": {"severity": "critical"},
    "skipped_step": {"severity": "info"},
}
SEVERITIES = {"info", "warning", "critical", "proof", "action"}
DIAGNOSES = {"no_gradient", "vanishing", "exploding"}
LEVELS = {"none", "some", "most", "all"}
CHOICES = {
    "alarm": ("diagnosis", DIAGNOSES),
    "alarm_cleared": ("diagnosis", DIAGNOSES),
    "channels": ("level", LEVELS),
    "channels_cleared": ("level", LEVELS),
}

Event = dict[str, object]
#: Check to status and what was seen.
Results = dict[str, tuple[str, str]]


class NotAKeyError(Exception):
    """What was given is no public Ed25519 key."""


def canonical(value: object) -> str:
    """The canonical form of a JSON value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def read_regular(path: Path, limit: int = -1, *, follow: bool = False) -> bytes:
    """The bytes of a regular file; raises ``OSError`` for a link, a pipe and the like."""
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    with os.fdopen(os.open(path, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("is not a regular file")
        return file.read(limit)


def read_events(data: bytes) -> tuple[list[Event], list[str], list[str]]:
    """The events of a diary, the lines that are none, and the keys that stand twice."""
    events: list[Event] = []
    broken: list[str] = []
    twice: list[str] = []

    def once(pairs: list[tuple[str, object]]) -> Event:
        made = dict(pairs)
        if len(made) != len(pairs):
            twice.append(f"line {number}")
        return made

    for number, raw in enumerate(data.split(b"\n"), 1):
        text = raw.decode("utf-8", "replace")
        if not raw.strip():
            continue
        try:
            line = json.loads(text, object_pairs_hook=once)
        except (ValueError, RecursionError):
            line = None
        if isinstance(line, dict):
            events.append(line)
        else:
            broken.append(f"line {number} is no JSON object")
    return events, broken, twice


def check_diary(events: list[Event], broken: list[str]) -> Results:
    """The checks that the diary alone decides."""
    first: Event = events[0] if events else {}
    kinds = [event.get("event") for event in events]
    order = [
        *(["the first event is not run_start"] if kinds[:1] != ["run_start"] else []),
        *(["several run_start"] if kinds.count("run_start") > 1 else []),
        *(["no run_end"] if "run_end" not in kinds else []),
        *(["several run_end"] if kinds.count("run_end") > 1 else []),
        *(["something comes after run_end"] if "run_end" in kinds[:-1] else []),
    ]
    numbers = [event.get("seq") for event in events]
    gaps = [f"event {i} has another seq" for i, n in enumerate(numbers)
            if type(n) is not int or n != i]  # fmt: skip
    results = {
        "parse": failed(broken, f"{len(events)} events"),
        "genesis": failed([] if first.get("prev") == ZEROS else ["no first prev of 64 zeros"]),
        "chain": failed([*broken, *chain_breaks(events)]),
        "seq": failed(gaps),
        "bookends": failed(order),
    }
    if kinds[:1] != ["run_start"] or "record_version" not in first:
        results["schema"] = ("skipped", "no run_start with a record_version")
    else:
        wrong = [f"event {i}: {text}" for i, e in enumerate(events) for text in field_faults(e)]
        results["schema"] = failed(wrong)
    return results


def chain_breaks(events: list[Event]) -> list[str]:
    """The first event that does not hash to its hash, or does not follow the one before it."""
    before: object = events[0].get("prev") if events else None
    for i, event in enumerate(events):
        body = {key: value for key, value in event.items() if key not in {"prev", "hash"}}
        prev = event.get("prev")
        try:
            text = f"{prev}{canonical(body)}".encode()
        except (ValueError, RecursionError):
            text = b""
        if not isinstance(prev, str) or hashlib.sha256(text).hexdigest() != event.get("hash"):
            return [f"event {i} was edited"]
        if prev != before:
            return [f"event {i} does not follow the one before it"]
        before = event["hash"]
    return []


def field_faults(event: Event) -> list[str]:  # noqa: C901 - a line a rule
    """What is wrong with the fields of an event; nothing is known of unknown types."""
    kind = event.get("event")
    form = str(kind) if kind in REQUIRED else ""
    names = ["seq", "time", "event", "prev", "hash", *REQUIRED.get(form, "").split()]
    wrong = [f"{name} is missing" for name in names if name not in event]
    seq, step = event.get("seq", 0), event.get("step", 0)
    if type(seq) is not int or seq < 0:
        wrong.append("seq is no int from 0")
    if type(event.get("time", 0)) not in {int, float}:
        wrong.append("time is no number")
    if not isinstance(event.get("event", ""), str):
        wrong.append("event is no text")
    for name in ("prev", "hash"):
        text = event.get(name, ZEROS)
        if not isinstance(text, str) or not HASH(text):
            wrong.append(f"{name} is no hash")
    for name, value in FIXED.get(form, {}).items():
        if name in event and (type(event[name]) is not type(value) or event[name] != value):
            wrong.append(f"{name} is not {value!r}")
    if "step" in names and (type(step) is not int or step < 0):
        wrong.append("step is no int from 0")
    chosen = [("severity", SEVERITIES), *([CHOICES[form]] if form in CHOICES else [])]
    for name, allowed in chosen:
        if name in event and (not isinstance(event[name], str) or event[name] not in allowed):
            wrong.append(f"{name} is none of {', '.join(sorted(allowed))}")
    return wrong


def check_metrics(directory: Path | None, events: list[Event]) -> tuple[str, str]:
    """The hash in ``run_end``."""
    if directory is None:
        return "absent", "a diary on its own"
    last: Event = events[-1] if events else {}
    if last.get("event") != "run_end":
        return "skipped", "no run_end"
    try:
        found = hashlib.sha256(read_regular(directory / METRICS)).hexdigest()
    except OSError as error:
        return "fail", f"{METRICS}: {error}"
    return failed([] if found == last.get("metrics_sha256") else [f"{METRICS} was changed"])


def check_seal(directory: Path, events: list[Event]) -> tuple[tuple[str, str], bytes, Event | None]:
    """The seal: its check, its bytes, and its content where it can be read."""
    if not os.path.lexists(directory / SEAL):
        return ("absent", "not sealed"), b"", None
    try:
        raw = read_regular(directory / SEAL, MAX_SEAL + 1)
        seal = json.loads(raw.decode()) if len(raw) <= MAX_SEAL else None
    except (OSError, ValueError, RecursionError) as error:
        return ("fail", f"{SEAL}: {error}"), b"", None
    if not isinstance(seal, dict):
        return ("fail", f"{SEAL} is no JSON object of at most 1 MiB"), b"", None
    wrong = []
    try:
        if canonical(seal).encode() != raw:
            wrong.append("not canonical")
    except (ValueError, RecursionError):
        wrong.append("without a canonical form")
    if seal.get("format") != "ormas-monitor-record":
        wrong.append("another format")
    head = events[-1].get("hash") if events else None
    if seal.get("diary_head") != (head if isinstance(head, str) else None):
        wrong.append("another head")
    if type(seal.get("events")) is not int or seal["events"] != len(events):
        wrong.append("another number of events")
    wrong += file_faults(directory, seal.get("files"))
    return failed(wrong), raw, seal


def file_faults(directory: Path, files: object) -> list[str]:
    """What is wrong with the files that a seal lists, or with the list."""
    if not isinstance(files, dict):
        return ["files is no object"]
    wrong = [f"{name} is not listed" for name in (DIARY, METRICS) if name not in files]
    for name, digest in files.items():
        if name in {"", ".", ".."} or set(name) & {"/", "\\", "\0"}:
            wrong.append(f"{name!r} is no bare file name")
            continue
        try:
            found = hashlib.sha256(read_regular(directory / name)).hexdigest()
        except (OSError, ValueError) as error:
            wrong.append(f"{name}: {error}")
            continue
        if found != digest:
            wrong.append(f"{name} was changed")
    return wrong


def check_signature(  # noqa: PLR0911 - a line for each way in which there is none
    directory: Path, raw: bytes, seal: Event | None, key: bytes | None
) -> tuple[str, str]:
    """The signature over the seal."""
    named = seal.get("signer") if seal is not None else None
    signer = named if isinstance(named, dict) else {}
    if not os.path.lexists(directory / SIGNATURE):
        if signer:
            return "fail", "the seal names a signer, and there is no signature"
        return ("absent", "not signed") if key is None else ("fail", "no signature for this key")
    try:
        signature = read_regular(directory / SIGNATURE, 65)
    except OSError as error:
        return "fail", f"{SIGNATURE}: {error}"
    if seal is None:
        return "fail", "no seal that it could be over"
    if len(signature) != 64:  # noqa: PLR2004 - Ed25519
        return "fail", "not 64 bytes"
    if key is None:
        return "unchecked", f"signed by {signer.get('public_key_sha256')}, as the seal says"
    if signer.get("public_key_sha256") != hashlib.sha256(key).hexdigest():
        return "fail", "the seal names another key"
    return ("pass", "by this key") if fits(key, signature, raw) else ("fail", "wrong signature")


def load_key(path: Path) -> bytes:
    """The raw bytes of a public key in PEM form. Raises :class:`NotAKeyError`."""
    from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import load_pem_public_key  # noqa: PLC0415

    try:
        key = load_pem_public_key(path.read_bytes())
    except Exception as error:
        raise NotAKeyError(f"{path}: {error}") from error
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise NotAKeyError(f"{path} is no Ed25519 key")
    return key.public_bytes_raw()


def fits(key: bytes, signature: bytes, data: bytes) -> bool:
    """Whether the signature is over the data by the key's owner."""
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415

    try:
        ed25519.Ed25519PublicKey.from_public_bytes(key).verify(signature, data)
    except InvalidSignature:
        return False
    return True


def check_digests(directory: Path, events: list[Event]) -> list[str]:
    """Lines and rows whose running digest is not that of the metrics before them."""
    try:
        rows = read_regular(directory / METRICS).splitlines(keepends=True)
    except OSError:
        return []
    seen = hashlib.sha256()
    digests = [seen.hexdigest()]
    wrong = []
    for number, row in enumerate(rows, 1):
        try:
            content = json.loads(row)
        except (ValueError, RecursionError):
            content = None
        said = content.get("digest", digests[-1]) if isinstance(content, dict) else digests[-1]
        if said != digests[-1]:
            wrong.append(f"row {number}")
        seen.update(row)
        digests.append(seen.hexdigest())
    for i, event in enumerate(events):
        count, said = event.get("metrics_rows"), event.get("metrics_digest")
        known = type(count) is int and 0 <= count < len(digests)
        if known and said != digests[count]:  # type: ignore[index] # an int, as just seen
            wrong.append(f"event {i}")
    return wrong


def failed(wrong: list[str], good: str = "") -> tuple[str, str]:
    """A failure with what is wrong, or a pass."""
    return ("fail", "; ".join(wrong[:3])) if wrong else ("pass", good)


def verify(given: Path, key: bytes | None = None) -> Results:
    """All checks of a run directory or a diary. Raises ``OSError`` where there is none."""
    directory = given if given.is_dir() else given.parent if given.name == DIARY else None
    path = given if directory is None else directory / DIARY
    path.lstat()
    try:
        data = read_regular(path, follow=directory is None)
    except OSError as error:
        return dict.fromkeys(NINE, ("skipped", "")) | {"parse": ("fail", str(error))}
    events, broken, twice = read_events(data)
    results = check_diary(events, broken)
    results["metrics"] = check_metrics(directory, events)
    if directory is None:
        results["seal"] = ("absent", "a diary on its own")
        unsigned = ("absent", "a diary on its own")
        results["signature"] = unsigned if key is None else ("fail", "no signature for this key")
    else:
        results["seal"], raw, seal = check_seal(directory, events)
        results["signature"] = check_signature(directory, raw, seal, key)
        results["digests"] = failed(check_digests(directory, events))
        with contextlib.suppress(OSError):  # the metrics check has said so
            twice += [f"row {where}" for where in read_events(read_regular(directory / METRICS))[2]]
    results["duplicates"] = failed([f"{where}: a key stands twice" for where in twice])
    first: Event = events[0] if events else {}
    if "record_version" not in first and not str(first.get("tool")).startswith("ormas-monitor 0.1"):
        results["record_version"] = ("fail", "missing: the schema was not checked")
    return results


def main(words: list[str], say: Callable[[str], object] = print) -> int:
    """Verify, print a line a check, and return the status."""
    if len(words) not in {1, 2}:
        say(__doc__ or "")
        return 2
    try:
        key = load_key(Path(words[1])) if words[1:] else None
        results = verify(Path(words[0]), key)
    except (OSError, ImportError, NotAKeyError) as error:
        say(f"error: {error}")
        return 2
    for name, (status, text) in results.items():
        say(f"{status:<10} {name:<15} {text}".rstrip())
    good = all(status != "fail" for status, _ in results.values())
    say("VERIFIED" if good else "NOT VERIFIED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
