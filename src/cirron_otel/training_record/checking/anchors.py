"""Anchors: heads of a record that were kept where the training cannot rewrite them.

An anchor says which hash the line ``seq`` had, and what the metrics file was by then. It travels as
attributes of log records and spans, so a collector's export, a spool directory and a server's
answer are all searched alike: whatever carries ``cirron.record.hash`` is an anchor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from cirron_otel import semconv
from cirron_otel.errors import RecordError
from cirron_otel.training_record.checking.findings import FAIL, PASS, Check, shown, shown_hash
from cirron_otel.training_record.checking.reader import open_regular
from cirron_otel.training_record.events import is_hash

_MARK = semconv.RECORD_HASH.encode()
_MAX_DOCUMENT = 256 * 1024 * 1024
_TIMEOUT_S = 30.0
_NO_ROWS = sha256().hexdigest()


class Anchor(NamedTuple):
    """One anchor, and where it was found."""

    run_id: str | None
    seq: int
    hash: str
    metrics_digest: str | None
    source: str


def load(source: str | Path) -> list[Anchor]:
    """All anchors of an OTLP JSON file, a spool directory or an ``http(s)://`` address.

    A file holds one OTLP JSON document, or one a line, as collectors write them. An address is
    asked once, with GET, and answers with such a document. Raises
    :class:`~cirron_otel.errors.RecordError` where it cannot be read; blocks for as long as that
    takes, at an address at most 30 s without an answer.
    """
    text = str(source)
    if text.startswith(("http://", "https://")):
        return _in_bytes(_get(text), shown(text))
    path = Path(source)
    try:
        if path.is_dir():
            return [anchor for file in _spool_files(path) for anchor in _in_file(file)]
        return list(_in_file(path))
    except OSError as exc:
        raise RecordError(f"cannot read anchors from {path}: {exc.strerror or exc}") from exc


def _spool_files(path: Path) -> list[Path]:
    files = sorted(path.glob("*.json")) or sorted(path.glob("spool/*.json"))
    if not files:
        raise RecordError(f"{path} holds no spool: there is no .json file in it, nor in its spool/")
    return files


def _in_file(path: Path) -> Iterator[Anchor]:
    with open_regular(path, follow=True) as raw:
        first = True
        while line := _read_line(raw):
            try:
                yield from _in_document(line, path.name)
            except ValueError as exc:
                if not first:
                    raise RecordError(f"{path} is no OTLP JSON: {exc}") from exc
                rest = raw.read(_MAX_DOCUMENT)
                yield from _in_bytes(line + rest, str(path))
                return
            first = False


def _read_line(raw: Any) -> bytes:  # noqa: ANN401 - an unbuffered file
    return bytes(raw.readline(_MAX_DOCUMENT))


def _in_bytes(data: bytes, name: str) -> list[Anchor]:
    try:
        return list(_in_document(data, name))
    except ValueError as first:
        try:
            return [a for line in data.splitlines() for a in _in_document(line, name)]
        except ValueError:
            raise RecordError(f"{name} is no OTLP JSON: {first}") from first


def _in_document(data: bytes, name: str) -> Iterator[Anchor]:
    """Anchors anywhere in a document. Raises ``ValueError`` where it is no JSON."""
    if not data.strip():
        return
    # Only here: most records are verified without anchors, and it takes a while to load.
    import msgspec  # noqa: PLC0415

    try:
        stack: list[Any] = [msgspec.json.decode(data)]
    except RecursionError:
        raise ValueError("nested too deep") from None
    if _MARK not in data:
        return
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack.extend(node)
        elif isinstance(node, dict):
            for key in ("attributes", "attrs"):
                attributes = _attributes(node.get(key))
                if semconv.RECORD_HASH in attributes:
                    yield _anchor(attributes, name)
            stack.extend(item for item in node.values() if isinstance(item, (dict, list)))


def _attributes(given: object) -> Mapping[str, Any]:
    """Attributes as a mapping, from OTLP's list of pairs or from the spool's object."""
    if isinstance(given, dict):
        return given
    found: dict[str, Any] = {}
    for pair in given if isinstance(given, list) else ():
        if isinstance(pair, dict) and isinstance(pair.get("key"), str):
            value = pair.get("value")
            found[pair["key"]] = (
                next(iter(value.values()), None) if isinstance(value, dict) else value
            )
    return found


def _anchor(attributes: Mapping[str, Any], name: str) -> Anchor:
    seq, digest = attributes.get(semconv.RECORD_SEQ), attributes[semconv.RECORD_HASH]
    try:
        number = int(seq)  # type: ignore[arg-type] # OTLP JSON writes 64-bit integers as text
    except (TypeError, ValueError):
        raise RecordError(f"{name}: an anchor has seq {shown(seq)}, which is no number") from None
    if not isinstance(digest, str) or not is_hash(digest):
        raise RecordError(f"{name}: the anchor of seq {number} has no hash of 64 hex digits")
    run_id, rows = (
        attributes.get(semconv.RECORD_RUN_ID),
        attributes.get(semconv.RECORD_METRICS_DIGEST),
    )
    return Anchor(
        run_id if isinstance(run_id, str) else None,
        number,
        digest,
        rows if isinstance(rows, str) else None,
        name,
    )


def _get(url: str) -> bytes:
    # Only this needs a network library: the other commands start without it.
    import urllib3  # noqa: PLC0415

    try:
        answer = urllib3.request(
            "GET",
            url,
            headers={"Accept": "application/json"},
            timeout=_TIMEOUT_S,
            retries=False,
            preload_content=False,
        )
        body = answer.read(_MAX_DOCUMENT)
        answer.release_conn()
    except urllib3.exceptions.HTTPError as exc:
        raise RecordError(f"cannot read anchors from {shown(url)}: {shown(exc, 200)}") from exc
    if answer.status != 200:  # noqa: PLR2004 - the one good answer
        raise RecordError(f"{shown(url)} answered {answer.status}, not with anchors")
    return bytes(body)


class AnchorCheck:
    """Holds the anchors of one run against its diary's lines as they go by.

    ``wanted`` has the digests that the metrics file must have had; whoever reads the rows takes
    them out as they occur.
    """

    def __init__(self, anchors: list[Anchor]) -> None:
        self._all = anchors
        #: By line, the anchors that no line was held against yet.
        self.open: dict[int, set[Anchor]] = {}
        self._wrong: list[str] = []
        self._run_id: object = None
        self._matched = 0
        self._last = -1
        self._lines = 0
        self.wanted: dict[str, Anchor] = {}

    def line(self, index: int, event: Mapping[str, Any], digest: object) -> None:
        """A line of the diary; the first one says which run it is."""
        self._lines = index + 1
        if index == 0:
            self._choose(event.get("run_id"))
        for anchor in self.open.pop(index, ()):
            if anchor.hash == digest:
                self._matched += 1
                self._last = index
            else:
                self._wrong.append(
                    f"{_named(anchor)} has hash {shown_hash(anchor.hash)}, line {index} of the "
                    f"diary has {shown_hash(digest)}: the diary was rewritten"
                )

    def passed(self, lines: int) -> None:
        """So many lines were there so far; those without an anchor need not be told one by one."""
        self._lines = lines

    def _choose(self, run_id: object) -> None:
        self._run_id = run_id
        known = {anchor for anchor in self._all if anchor.run_id == run_id}
        for anchor in known:
            self.open.setdefault(anchor.seq, set()).add(anchor)
            if anchor.metrics_digest not in {None, _NO_ROWS}:
                self.wanted[str(anchor.metrics_digest)] = anchor

    def result(self, *, with_metrics: bool) -> Check:
        """The verdict, once the diary and the rows have been read."""
        wrong = list(self._wrong)
        cut = sorted(
            (anchor for anchors in self.open.values() for anchor in anchors),
            key=lambda anchor: (anchor.seq, anchor.hash),
        )
        wrong += [
            f"{_named(anchor)} (hash {shown_hash(anchor.hash)}) has no line: the diary has "
            f"{self._lines} lines, its end was cut off"
            for anchor in cut
        ]
        if with_metrics:
            wrong += [
                f"{_named(anchor)}: metrics.jsonl is not what it was then"
                for anchor in sorted(self.wanted.values(), key=lambda anchor: anchor.seq)
            ]
        if wrong:
            text = "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if wrong[3:] else "")
            return Check("anchors", "anchors", FAIL, text)
        if not self._matched:
            text = (
                f"none of the {len(self._all)} anchors is of run {shown(self._run_id)}"
                if self._all
                else "no anchor was found there"
            )
            return Check("anchors", "anchors", FAIL, text)
        behind = self._lines - 1 - self._last
        text = f"{self._matched} anchors fit, the newest " + (
            f"that of line {self._last}; no anchor covers the {behind} lines after it"
            if behind
            else "that of the diary's last line"
        )
        return Check("anchors", "anchors", PASS, text)


def _named(anchor: Anchor) -> str:
    return f"anchor seq {anchor.seq} in {shown(anchor.source)}"
