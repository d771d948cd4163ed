"""Several ranks of one run: which of them a receiver of OTLP gets, and how they find each other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cirron_otel as ci
from cirron_otel.batch import Batch, SpanOtel
from cirron_otel.cli.main import main
from cirron_otel.otlp.gathering import Gatherer
from cirron_otel.otlp.ranks import SAMPLED_RANKS, leaves_out, takes
from delivery.otlp_server import OtlpServer, attributes, http_receiver
from helpers import StartProgram, read_spool
from spool_by_hand import hex32, span

RANK = """
import cirron_otel as ci
ci.profile(frameworks=[], flush_interval=0.05)
for k in range(3):
    with ci.scope("step", index=k):
        ci.mark("loss", 0.5)
"""


def start_rank(
    start: StartProgram, server: OtlpServer, rank: int, size: int, **more: str
) -> subprocess.Popen[str]:
    """One rank of a job on two nodes."""
    return start(
        RANK,
        {
            "CIRRON_OTLP": server.url,
            "CIRRON_EXIT_BUDGET": "30",
            "TORCHELASTIC_RUN_ID": "job",
            "WORLD_SIZE": str(size),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % (size // 2)),
            **more,
        },
    )


def ranks_of(server: OtlpServer) -> set[int]:
    """The ranks whose spans a receiver has."""
    return {int(attributes(one.attributes)["cirron.rank"]) for one in server.spans.values()}


@pytest.mark.parametrize(
    ("strategy", "expected"), [("rank0", {0}), ("first_per_node", {0, 2}), ("all", {0, 1, 2, 3})]
)
def test_which_ranks_go_out(
    start_program: StartProgram,
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
    expected: set[int],
) -> None:
    """The receiver has every signal of the ranks that the strategy takes, the spool all ranks."""
    with http_receiver() as server:
        ranks = [
            start_rank(start_program, server, rank, 4, CIRRON_RANKS=strategy) for rank in range(4)
        ]
        for process in ranks:
            process.communicate(timeout=100)
            assert process.returncode == 0
        # A rank that ends may see a batch that another one has written this moment, and leave it.
        monkeypatch.setenv("CIRRON_OTLP", server.url)
        monkeypatch.setenv("CIRRON_RANKS", strategy)
        assert main(["spool", "flush"]) == 0
        assert ranks_of(server) == expected
        resources = [
            attributes(one.resource.attributes)
            for request in server.beside
            for one in getattr(request.message, "resource_metrics", ())
        ]
        assert {one["dl.rank"] for one in resources} == expected
        closed = [one for one in server.spans.values() if not one.name.endswith("(open)")]
        rows = read_spool()
    assert {row.rank for row in rows.spans} == {0, 1, 2, 3}
    assert {one.span_id.hex() for one in closed} == {
        row.id[:16] for row in rows.spans if row.rank in expected
    }


def test_ranks_are_linked_to_rank_0(start_program: StartProgram) -> None:
    """The sessions of the other ranks link to rank 0's, whichever process delivers them."""
    with http_receiver() as server:
        for rank in range(2):
            process = start_rank(start_program, server, rank, 2)
            _, stderr = process.communicate(timeout=100)
            assert (process.returncode, stderr) == (0, "")
        sessions = {
            attributes(one.attributes)["cirron.rank"]: one
            for one in server.spans.values()
            if one.name == "cirron.session"
        }
    assert set(sessions) == {0, 1}
    assert not sessions[0].links
    [link] = sessions[1].links
    assert (link.trace_id, link.span_id) == (sessions[0].trace_id, sessions[0].span_id)
    assert sessions[1].trace_id != sessions[0].trace_id


def batch(rank: int, *, attempt: int = 1, run: str = "run", **fields: Any) -> Batch:
    """What one rank has written: its session, ended or open."""
    row = span(f"{run}{attempt}{rank}/s", "cirron.session", None, 0, 9, rank=rank)
    row.otel = SpanOtel(trace_id="a" * 16)
    made = Batch(1, "9", hex32(f"b{run}{attempt}{rank}"), row.start_ns, [row])
    made.resource = {"cirron.run.id": run, "cirron.run.attempt": attempt, "dl.rank": rank}
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def links(gatherer: Gatherer, one: Batch) -> list[tuple[str, list[str]]]:
    """The name of each span sent of a batch, and the spans that it links to."""
    return [(s.name, [link.span_id for link in s.links]) for s in gatherer.spans(one)]


def test_a_link_stays_within_run_and_attempt() -> None:
    """Rank 0 of another run or an earlier attempt is not the one to link to."""
    gatherer = Gatherer()
    first = batch(0)
    assert links(gatherer, first) == [("cirron.session", [])]
    assert links(gatherer, batch(1)) == [("cirron.session", [first.spans[0].id[:16]])]
    assert links(gatherer, batch(1, attempt=2)) == [("cirron.session", [])]
    assert links(gatherer, batch(1, run="other")) == [("cirron.session", [])]


def test_an_announced_session_is_linked() -> None:
    """A run that lasts for days is joined while it runs: the announcement bears the link, too."""
    gatherer = Gatherer(pending=True)
    first = batch(0)
    gatherer.learn(first)
    still = batch(1)
    still.open, still.spans = still.spans, []
    assert links(gatherer, still) == [("cirron.session (open)", [first.spans[0].id[:16]])]


@pytest.mark.parametrize("size", [1, 3, 16, 17, 64, 100, 1024, 4099])
def test_sampled_takes_a_few_of_many(size: int) -> None:
    """At most sixteen ranks, 0 among them, all of a small job, every local rank of a large one."""
    taken = [
        rank for rank in range(size)
        if takes("sampled", {"dl.rank": rank, "dl.world_size": size})
    ]  # fmt: skip
    assert taken[0] == 0
    assert len(taken) <= SAMPLED_RANKS
    assert len(taken) == size or len(taken) >= SAMPLED_RANKS // 2
    if size == 1024:
        assert {rank % 8 for rank in taken} == set(range(8))


def test_what_names_no_rank_goes_out() -> None:
    """A batch of another writer, or what is no batch at all, is left to those who read it."""
    for data in (b"{}", b"no batch", b'{"resource": {}}', b'{"resource": {"dl.rank": "x"}}'):
        assert not leaves_out("rank0", data)
    assert leaves_out("rank0", b'{"resource": {"dl.rank": 1}}')
    assert not leaves_out("all", b'{"resource": {"dl.rank": 1}}')


def test_a_child_that_records_by_itself_links_to_its_parent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A program started by a recorded one is told of ``TRACEPARENT``, ``BAGGAGE``, and of it."""
    monkeypatch.setenv("TRACEPARENT", f"00-{'ab' * 16}-{'cd' * 8}-01")
    monkeypatch.setenv("BAGGAGE", "team=vision,ticket=T%2D1")
    ci.profile(frameworks=[])
    source = "import cirron_otel as ci\nci.profile(frameworks=[], path='child')\nci.shutdown()\n"
    subprocess.run([sys.executable, "-c", source], cwd=tmp_path, check=True, timeout=50)
    ci.shutdown()
    [own] = read_spool().named("cirron.session")
    [child] = read_spool(tmp_path / "child").named("cirron.session")
    given = {
        "trace_id": "ab" * 16, "span_id": "cd" * 8, "attrs": {"team": "vision", "ticket": "T-1"},
    }  # fmt: skip
    assert own.otel.links == [given]
    above = {"trace_id": f"{own.otel.trace_id}{own.id[16:]}", "span_id": own.id[:16], "attrs": {}}
    assert json.loads(json.dumps(child.otel.links)) == [given, above]


@pytest.mark.parametrize("text", ["{}", "nonsense", '{"version": 1, "pid": 1, "parent": {}}'])
def test_a_carrier_of_nobody_is_no_link(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """What another version left in the environment is no reason to fail or to warn."""
    monkeypatch.setenv("CIRRON_OTEL_CARRIER", text)
    ci.profile(frameworks=[])
    ci.shutdown()
    [session] = read_spool().named("cirron.session")
    assert not session.otel.links
