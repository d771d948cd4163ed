"""What ties a run to what others record of it: resource attributes, and ids on log lines."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from opentelemetry import trace as otel_trace
from opentelemetry.sdk.trace import TracerProvider

import cirron_otel as ci
from cirron_otel import semconv, surroundings
from cirron_otel.batch import decode
from helpers import read_spool

COMMIT = "0123456789abcdef0123456789abcdef01234567"
UID = "5f0e9d6c-5b0c-4b2c-9c55-3a8c0a7f9b11"
FIELDS = ("message", "run_id", "attempt", "rank", "epoch", "iteration", "trace_id", "span_id")


class Kept(logging.Handler):
    """A handler that keeps its lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[list[str]] = []
        self.setFormatter(logging.Formatter("|".join(f"%({name})s" for name in FIELDS)))

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line, in its parts."""
        self.lines.append(self.format(record).split("|"))


@pytest.fixture
def log() -> tuple[logging.Logger, Kept]:
    """A logger of the program's whose handler has our filter."""
    logger = logging.getLogger("program")
    handler = Kept()
    handler.addFilter(ci.logging_filter())
    logger.handlers, logger.propagate = [handler], False
    return logger, handler


# --- log lines ----------------------------------------------------------------------------------


def test_log_lines_have_run_step_and_span(log: tuple[logging.Logger, Kept]) -> None:
    """A line says the run, the iteration and the span it was logged in; outside of all, nothing."""
    logger, kept = log
    logger.warning("before")
    ci.profile(frameworks=[], run_id="night")
    for _ in ci.epochs(range(2)):
        for _ in ci.batches(range(2)):
            logger.warning("in")
    logger.warning("outside")
    ci.shutdown()
    logger.warning("after")
    rows = read_spool()
    steps = rows.named("step")
    session = rows.one("cirron.session")
    assert kept.lines[0] == ["before", "", "", "", "", "", "", ""]
    assert kept.lines[-1] == ["after", "", "", "", "", "", "", ""]
    for number, line in enumerate(kept.lines[1:5]):
        otel = steps[number].otel
        assert line[:6] == ["in", "night", "1", "0", str(number // 2), str(number)]
        assert line[6:] == [f"{otel.trace_id}{steps[number].id[16:]}", steps[number].id[:16]]
    assert kept.lines[5][:6] == ["outside", "night", "1", "0", "", ""]
    assert kept.lines[5][7] == session.id[:16]


def test_a_foreign_span_is_named_on_the_line(log: tuple[logging.Logger, Kept]) -> None:
    """Inside another library's span the line leads to that one, with our run and iteration."""
    logger, kept = log
    ci.profile(frameworks=[], run_id="night")
    tracer = TracerProvider().get_tracer("other")
    for _ in ci.batches(range(1)):
        with tracer.start_as_current_span("query") as span:
            logger.warning("in")
    ci.shutdown()
    context = span.get_span_context()
    assert kept.lines[0][5:] == [
        "0",
        otel_trace.format_trace_id(context.trace_id),
        otel_trace.format_span_id(context.span_id),
    ]


def test_what_the_program_says_itself_stays(log: tuple[logging.Logger, Kept]) -> None:
    """A field that the program set with ``extra`` is not overwritten."""
    logger, kept = log
    ci.profile(frameworks=[], run_id="night")
    logger.warning("in", extra={"run_id": "mine", "iteration": 7})
    assert (kept.lines[0][1], kept.lines[0][5]) == ("mine", "7")


# --- the resource -------------------------------------------------------------------------------


def test_commit_and_gpu_are_on_the_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch says the commit and the GPU by which other records name them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-11111111-2222-3333-4444-555555555555")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", f"{semconv.COMMIT}={COMMIT},team=vision")
    ci.profile(frameworks=[])
    ci.shutdown()
    (file, *_) = sorted(Path(".cirron/spool").glob("*.json"))
    resource = decode(file.read_bytes()).resource
    assert resource[semconv.GPU_ID] == "GPU-11111111-2222-3333-4444-555555555555"
    assert resource[semconv.COMMIT] == COMMIT  # what OTel's variable says comes first
    assert resource["team"] == "vision"


def test_the_gpu_in_use_is_named_once_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the moment the program holds memory on a GPU, batches name the one that holds most."""
    reserved = [0, 0]
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        get_device_properties=lambda device: SimpleNamespace(uuid=f"{device}" * 8),
        memory=SimpleNamespace(
            memory_stats_as_nested_dict=lambda device: {
                "allocated_bytes": {"all": {"current": 0, "peak": 0}},
                "reserved_bytes": {"all": {"current": reserved[device]}},
            }
        ),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    ci.profile(frameworks=[])
    ci.mark("before", 1)
    ci.flush()
    reserved[:] = [1 << 20, 1 << 30]
    ci.flush()
    ci.mark("after", 1)
    ci.shutdown()
    said = {
        mark.name: batch.resource.get(semconv.GPU_ID)
        for batch in read_spool().batches
        for mark in batch.marks
    }
    assert (said["before"], said["after"]) == (None, "GPU-11111111")


def test_commit_of_every_kind_of_checkout(tmp_path: Path) -> None:
    """A branch, packed refs, a detached head, a further working tree: as git itself says."""

    def git(*words: str, at: Path) -> str:
        done = subprocess.run(
            ["git", "-c", "user.name=n", "-c", "user.email=e@example.org", *words],  # noqa: S607
            cwd=at, check=True, capture_output=True, text=True,
        )  # fmt: skip
        return done.stdout.strip()

    main, other = tmp_path / "main", tmp_path / "other"
    main.mkdir()
    git("init", "-q", at=main)
    git("commit", "-q", "--allow-empty", "-m", "one", at=main)
    head = git("rev-parse", "HEAD", at=main)
    inside = main / "src" / "deep"
    inside.mkdir(parents=True)
    assert surroundings.commit(inside, {}) == head
    git("pack-refs", "--all", at=main)
    assert surroundings.commit(inside, {}) == head
    git("worktree", "add", "-q", "-b", "side", str(other), at=main)
    git("commit", "-q", "--allow-empty", "-m", "two", at=other)
    assert surroundings.commit(other, {}) == git("rev-parse", "HEAD", at=other) != head
    git("checkout", "-q", "--detach", at=main)
    assert surroundings.commit(inside, {"GITHUB_SHA": COMMIT}) == head


def test_commit_without_a_repository(tmp_path: Path) -> None:
    """In an image without a repository what a build service says counts, if it is a commit."""
    assert surroundings.commit(tmp_path, {"GITHUB_SHA": COMMIT.upper()}) == COMMIT
    assert surroundings.commit(tmp_path, {"GIT_COMMIT": "main"}) is None
    (tmp_path / ".git").write_text("gitdir: nowhere")
    assert surroundings.commit(tmp_path, {}) is None


def test_a_commit_that_cannot_be_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links in a circle and a working directory that is gone raise nothing into the program."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "program.py", raising=False)
    (tmp_path / ".git").write_text("gitdir: round/git")
    (tmp_path / "round").symlink_to("round")
    monkeypatch.chdir(tmp_path)
    assert surroundings.program_commit({}) is None
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert surroundings.program_commit({}) is None


def test_pod_from_files_and_variables(tmp_path: Path) -> None:
    """Inside a pod its name, namespace and uid are found without a specification that says them."""
    token = tmp_path / "var/run/secrets/kubernetes.io/serviceaccount"
    token.mkdir(parents=True)
    (token / "namespace").write_text("research\n")
    proc = tmp_path / "proc/self"
    proc.mkdir(parents=True)
    (proc / "mountinfo").write_text(
        f"1 2 8:1 /var/lib/kubelet/pods/{UID}/etc-hosts /etc/hosts rw - ext4 /dev/sda1 rw\n"
    )
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "train-0", "NODE_NAME": "n7"}
    assert surroundings.pod(environ, tmp_path) == {
        semconv.K8S_POD_NAME: "train-0",
        semconv.K8S_NAMESPACE: "research",
        semconv.K8S_POD_UID: UID,
        semconv.K8S_NODE: "n7",
    }
    assert surroundings.pod({"HOSTNAME": "laptop"}, tmp_path) == {}


GPUS = {"0000:1b:00.0": "GPU-bbb", "0000:07:00.0": "GPU-aaa"}


@pytest.mark.parametrize(
    ("environ", "models", "expected"),
    [
        ({}, ("H200", "H200"), None),  # which of the two it will use, nobody knows yet
        ({"LOCAL_RANK": "1"}, ("H200", "H200"), "GPU-bbb"),
        ({"LOCAL_RANK": "1"}, ("H200", "L4"), None),  # CUDA numbers the fastest first
        ({"CUDA_VISIBLE_DEVICES": "1"}, ("H200", "H200"), "GPU-bbb"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ("H200", "L4"), None),
        (
            {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            ("H200", "L4"),
            "GPU-bbb",
        ),
        ({"CUDA_VISIBLE_DEVICES": "1,0", "LOCAL_RANK": "1"}, ("H200", "H200"), "GPU-aaa"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-d", "LOCAL_RANK": "1"}, ("H200", "L4"), "GPU-d"),
        ({"CUDA_VISIBLE_DEVICES": "MIG-77"}, ("H200", "H200"), "MIG-77"),
        ({"CUDA_VISIBLE_DEVICES": ""}, ("H200", "H200"), None),
        ({"CUDA_VISIBLE_DEVICES": "9"}, ("H200", "H200"), None),
        ({"LOCAL_RANK": "5"}, ("H200", "H200"), None),
    ],
)
def test_gpu_only_where_there_is_no_doubt(
    environ: dict[str, str], models: tuple[str, str], expected: str | None, tmp_path: Path
) -> None:
    """The GPU is named from files where it cannot be another one, and is left open elsewhere."""
    for (place, uuid), model in zip(sorted(GPUS.items()), models, strict=True):
        folder = tmp_path / "proc/driver/nvidia/gpus" / place
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t NVIDIA {model}\nGPU UUID: \t {uuid}\n")
    rank = int(environ.get("LOCAL_RANK", 0))
    assert surroundings.gpu_id(rank, environ, tmp_path) == expected
