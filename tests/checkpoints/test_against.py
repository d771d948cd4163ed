"""One checkpoint held against another: what changed, by how much, what died meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from checkpoints_by_hand import changed, f32, network, rows, write
from cirron_otel.checkpoints.checking import check
from cirron_otel.checkpoints.comparing import compare
from cirron_otel.checkpoints.opening import open_checkpoint
from cirron_otel.cli.app import cli


def test_identical_weights_are_told(tmp_path: Path) -> None:
    """A training that changed nothing is a warning."""
    base = write(tmp_path / "base.safetensors", network())
    found = check(write(tmp_path / "new.safetensors", network()), against=base)
    assert [(one.severity, one.kind) for one in found.findings] == [
        ("warning", "identical_weights")
    ]


def test_changes_are_measured(tmp_path: Path) -> None:
    """The most changed tensor comes first, with the length of the change over the norm before."""
    before = {"a.weight": torch.randn(300, 1000), "b.weight": torch.randn(40, 30),
              "c.weight": torch.randn(4, 4), "gone": torch.ones(2)}  # fmt: skip
    after = {"a.weight": before["a.weight"] * 1.5, "b.weight": before["b.weight"] + 1,
             "c.weight": before["c.weight"], "new": torch.ones(2)}  # fmt: skip
    save_file(before, tmp_path / "before.safetensors")
    save_file(after, tmp_path / "after.safetensors")
    found = check(tmp_path / "after.safetensors", against=tmp_path / "before.safetensors")
    diff = found.diff
    assert diff is not None
    assert [one.tensor for one in diff.changed] == ["b.weight", "a.weight"]
    shift = (after["b.weight"].double() - before["b.weight"].double()).norm()
    assert diff.changed[0].abs_change == pytest.approx(shift.item(), rel=1e-9)
    assert diff.changed[1].change == pytest.approx(0.5, rel=1e-6)
    assert (diff.unchanged, diff.added, diff.removed) == (["c.weight"], ["new"], ["gone"])
    assert [one.kind for one in found.findings] == ["frozen_tensors"]


def test_numpy_is_not_needed(tmp_path: Path) -> None:
    """Without it the same numbers come from Python."""
    for number, name in enumerate(("before", "after")):
        save_file(
            {"a": torch.linspace(number, 3, 500).bfloat16(), "b": torch.linspace(number, 9, 7)},
            tmp_path / f"{name}.safetensors",
        )
    paths = [tmp_path / f"{name}.safetensors" for name in ("before", "after")]
    with_numpy = compare(*(open_checkpoint(path).tensors for path in paths))
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "from pathlib import Path\n"
        "from cirron_otel.checkpoints.comparing import compare\n"
        "from cirron_otel.checkpoints.opening import open_checkpoint\n"
        "found = compare(*(open_checkpoint(Path(p)).tensors for p in sys.argv[1:]))\n"
        "print(*(f'{one.tensor} {one.change:.12g}' for one in found.changed), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, paths)],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split("\n")[:-1] == [
        f"{one.tensor} {one.change:.12g}" for one in with_numpy.changed
    ]
    assert len(with_numpy.changed) == 2


def test_complex_weights_are_the_same_in_either_kind_of_file(tmp_path: Path) -> None:
    """A file of torch counts and compares them as safetensors does, conjugated lazily or not."""
    state = {"w": torch.randn(2, 3, dtype=torch.complex64).conj()}
    torch.save(state, tmp_path / "m.pt")
    save_file({"w": state["w"].resolve_conj()}, tmp_path / "m.safetensors")
    found = check(tmp_path / "m.pt", against=tmp_path / "m.safetensors")
    assert found.diff is not None
    assert found.diff.unchanged == ["w"]
    assert (found.dtypes, found.parameters) == ({"complex64": 1}, 6)


def test_channels_that_died_meanwhile(tmp_path: Path) -> None:
    """What was constant in the base already is not new."""
    old = changed(network(bias=[-0.1] * 8), "conv1.weight", dict.fromkeys(range(27), 0.0))
    new = changed(old, "conv1.weight", dict.fromkeys(range(27, 81), 0.0))
    base = write(tmp_path / "base.safetensors", old)
    found = check(write(tmp_path / "new.safetensors", new), against=base)
    (dead,) = [one for one in found.findings if one.kind == "newly_dead"]
    assert dead.severity == "warning"
    assert dead.attributes == {"batchnorm": "bn1", "count": 2, "channels": [1, 2]}


def test_other_shapes_types_and_rows(tmp_path: Path) -> None:
    """Reshaped and retyped tensors are named; unused rows of an embedding are counted."""
    table = rows(6, 4)
    old = {"wte.weight": f32(table, 6, 4), "fc.weight": f32(rows(2, 4), 2, 4),
           "x.weight": f32([1.0, 2.0], 1, 2)}  # fmt: skip
    base = write(tmp_path / "base.safetensors", old)
    new = changed(old, "wte.weight", {0: 9.0, 5: 9.0})
    new["fc.weight"] = f32(rows(3, 4), 3, 4)
    new["x.weight"] = new["x.weight"]._replace(code="BF16", data=b"\x80\x3f\x00\x40")
    diff = check(write(tmp_path / "new.safetensors", new), against=base).diff
    assert diff is not None
    assert diff.reshaped == [{"tensor": "fc.weight", "before": [2, 4], "after": [3, 4]}]
    assert diff.dtype_changed == [{"tensor": "x.weight", "before": "float32", "after": "bfloat16"}]
    assert diff.unchanged == ["x.weight"]
    assert diff.embedding_rows_unchanged == [{"tensor": "wte.weight", "unchanged": 4, "rows": 6}]


def test_the_terminal_and_the_page_show_it(tmp_path: Path) -> None:
    """Both name the changed tensors; the page fetches and runs nothing."""
    base = write(tmp_path / "base.safetensors", network())
    path = write(tmp_path / "new.safetensors", changed(network(), "fc.weight", {0: 50.0}))
    page = tmp_path / "page.html"
    done = CliRunner().invoke(cli, ["check", str(path), "--against", str(base), "--out", str(page)])
    assert done.exit_code == 0
    assert "1 changed, 6 unchanged" in done.output
    html = page.read_text()
    assert "<code>fc.weight</code>" in html
    assert "default-src 'none'" in html
    assert '<td class="n">8</td>' in html
