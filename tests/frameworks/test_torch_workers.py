"""Scopes and marks in DataLoader workers, forked and spawned: they arrive, in the right place."""

from __future__ import annotations

import pytest

from helpers import RunProgram, tree_text

PROGRAM = """
    import sys
    import torch
    from torch.utils.data import DataLoader, Dataset
    import cirron_otel as ci

    class Read(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            with ci.scope("read", item=index):
                with ci.scope("decode"):
                    ci.mark("bytes", index)
            return torch.zeros(1)

    if __name__ == "__main__":
        method, persistent, explicit = sys.argv[1], sys.argv[2] == "yes", sys.argv[3] == "yes"
        before = Read()
        loader = DataLoader(
            before, num_workers=2, multiprocessing_context=method, persistent_workers=persistent
        )
        ci.profile()
        for _ in (ci.epochs if explicit else list)(range(int(sys.argv[4]))):
            for item in loader:
                with ci.scope("use"):
                    pass
        del loader  # persistent workers end here
        ci.mark("end", 1)
        ci.shutdown()
        assert "CIRRON_OTEL_CARRIER" not in __import__("os").environ
"""

PROFILE = """ci.profile()
        from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as iterator
        print("handler:", hasattr(iterator, "_register_persistent_workers_atexit"))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "persistent", "explicit", "count"),
    [
        ("fork", "no", "yes", 2),
        ("fork", "no", "no", 2),
        ("fork", "yes", "yes", 2),
        ("spawn", "no", "yes", 1),
    ],
)
def test_what_a_worker_records_arrives(
    run_program: RunProgram, method: str, persistent: str, explicit: str, count: int
) -> None:
    """Every scope and mark of a worker is there once, with its worker's number (C-W13, C-W14)."""
    run = run_program(PROGRAM, args=(method, persistent, explicit, str(count)))
    assert run.stderr == ""
    reads, decodes = run.named("read"), run.named("decode")
    assert sorted(span.attrs["item"] for span in reads) == sorted([0, 1, 2, 3] * count)
    assert all(span.attrs["worker_id"] == span.attrs["item"] % 2 for span in reads)
    assert len(decodes) == 4 * count
    assert {span.parent_id for span in decodes} == {span.id for span in reads}
    assert all("worker_id" in span.attrs for span in decodes)
    marks = [mark for mark in run.marks if mark.name == "bytes"]
    assert {mark.span_id for mark in marks} == {span.id for span in decodes}
    assert all("worker_id" in mark.attrs for mark in marks)

    main = run.one("cirron.session")
    epochs = run.named("epoch")
    assert [epoch.index for epoch in epochs] == list(range(count))
    assert main.pid not in {span.pid for span in reads}
    parents = {span.parent_id for span in reads}
    if explicit == "yes" and persistent == "no":
        assert parents == {epoch.id for epoch in epochs}
    else:
        assert parents == {main.id}

    use = "      data_load\n      use\n"
    loop = "".join(f"    step[{n}]\n{use}" for n in range(4))
    tree = tree_text(run, without=("read",)) + "\n"
    assert tree == "cirron.session\n" + "".join(f"  epoch[{n}]\n{loop}" for n in range(count))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_persistent_workers_left_to_the_end_lose_nothing(
    run_program: RunProgram, method: str
) -> None:
    """Workers that still live when the process exits write what they have, and end quietly."""
    program = PROGRAM.split("        del loader", maxsplit=1)[0].replace("ci.profile()", PROFILE)
    run = run_program(program, args=(method, "yes", "no", "2"))
    if "handler: False" in run.stdout:
        pytest.skip("this torch has no handler that ends persistent workers at exit")
    assert run.stderr == ""
    assert sorted(span.attrs["item"] for span in run.named("read")) == sorted([0, 1, 2, 3] * 2)
    assert len(run.named("decode")) == 8
    assert list((run.output_dir / "run").glob("*.lock")) == []


def test_workers_that_record_nothing_start_nothing(run_program: RunProgram) -> None:
    """A worker without scopes writes no file, starts no thread and leaves no lock (report 10)."""
    run = run_program(
        """
        import threading
        import torch
        from torch.utils.data import DataLoader
        import cirron_otel as ci

        class Count(torch.utils.data.Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                return sum(t.name.startswith("cirron") for t in threading.enumerate())

        ci.profile(flush_interval=0.05)
        for item in DataLoader(Count(), num_workers=2, batch_size=2):
            ci.mark("threads", item.sum())
        """
    )
    assert run.stderr == ""
    assert [mark.value for mark in run.marks if mark.name == "threads"] == [0, 0]
    assert len({span.pid for span in run.spans}) == 1
    assert list((run.output_dir / "run").glob("*.lock")) == []
