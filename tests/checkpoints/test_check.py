"""What ``cirron-otel check`` finds in a checkpoint, and what it leaves alone."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from checkpoints_by_hand import Raw, batchnorm, changed, f32, network, rows, write
from cirron_otel.checkpoints.checking import Result, check
from cirron_otel.cli.app import cli

NAN, INF = math.nan, math.inf


def _found(tmp_path: Path, tensors: dict[str, Raw]) -> Result:
    return check(write(tmp_path / "model.safetensors", tensors))


def _kinds(found: Result) -> list[tuple[str, str, str | None]]:
    return [(one.severity, one.kind, one.layer) for one in found.findings]


def test_a_sound_checkpoint_has_no_findings(tmp_path: Path) -> None:
    """Nothing is said of a model that is as it should be, and its parameters are counted right."""
    found = _found(tmp_path, network())
    assert found.findings == []
    assert found.parameters == 8 * 27 + 2 * 8 + 10 * 8 + 10
    assert [one.batchnorm.producer for one in found.layers] == ["conv1"]
    assert found.verdict() == "No problem found."


@pytest.mark.parametrize("pure", ["0", "1"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "float8_e5m2"])
def test_nan_and_infinities_are_counted(dtype: str, pure: str, tmp_path: Path) -> None:
    """Of every type, with the compiled kernel and without it."""
    weight = torch.randn(6, 50).to(getattr(torch, dtype))
    weight.view(-1)[[3, 100]] = NAN
    weight.view(-1)[[7]] = INF
    weight.view(-1)[[8]] = -INF
    save_file({"layer.weight": weight}, tmp_path / "m.safetensors")
    program = (
        f"import os, sys; os.environ['CIRRON_OTEL_PURE'] = {pure!r}; "
        "from cirron_otel.cli.app import run; sys.exit(run(['check', 'm.safetensors', '--json']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 1, done.stderr
    (finding,) = json.loads(done.stdout)["findings"]
    assert finding["kind"] == "nonfinite"
    assert finding["layer"] == "layer.weight"
    assert finding["attributes"] == {"nan": 2, "infinite": 2}


def test_torch_is_not_imported_for_safetensors(tmp_path: Path) -> None:
    """Nor numpy, nor OpenTelemetry, nor rich: the command starts quickly."""
    path = write(tmp_path / "model.safetensors", network())
    program = (
        "import sys; from cirron_otel.cli.app import run; "
        f"status = run(['check', {str(path)!r}]); "
        "heavy = {'torch', 'numpy', 'opentelemetry', 'rich', 'safetensors'} & set(sys.modules); "
        "sys.exit(status or bool(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    assert done.returncode == 0


def _lesioned() -> dict[str, Raw]:
    """Channel 0 dead by its row, 1 by scale, 2 flat, 3 and 4 decayed, 5 dormant, 6 collapsed."""
    bias = [-0.1, -0.1, 0.1, -0.1, -0.1, -9.0, 0.1, 0.1]
    scale = [1.0, 0.0, 0.0, 1e-8, 1.0, 1.0, 1.0, 1.0]
    variance = [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1e-15, 1.0]
    tensors = network(weight=scale, bias=bias, running_var=variance)
    tensors = changed(tensors, "conv1.weight", dict.fromkeys(range(27), 0.0))
    return changed(tensors, "conv1.weight", dict.fromkeys(range(4 * 27, 5 * 27), 1e-9))


def test_channels_are_classified(tmp_path: Path) -> None:
    """Each class has its channels, and each channel one class at most."""
    found = _found(tmp_path, _lesioned())
    (one,) = found.layers
    assert (one.dead, one.flat, one.decayed, one.dormant) == ([0, 1], [2], [3, 4], [5])
    assert one.collapsed == 2


def test_what_rests_on_a_guess_is_no_warning(tmp_path: Path) -> None:
    """Dead channels are facts where a ReLU is supposed, and warnings where it was stated."""
    path = write(tmp_path / "model.safetensors", _lesioned())
    guessed = check(path)
    assert not guessed.fails("warning")
    assert {one.kind for one in guessed.findings} == {
        "dead_channels", "decayed_channels", "flat_channels", "dormant_channels",
        "collapsed_variance",
    }  # fmt: skip
    assert "if a ReLU directly follows" in guessed.findings[0].message
    stated = check(path, relu_after=["bn*"])
    assert stated.fails("warning")
    assert _kinds(stated)[0] == ("warning", "dead_channels", "bn1")
    assert "if a ReLU" not in stated.findings[0].message
    done = CliRunner().invoke(
        cli, ["check", str(path), "--relu-after", "bn1", "--fail-on", "warning"]
    )
    assert done.exit_code == 1
    assert "FAILED: --fail-on warning" in done.output


def test_a_layer_most_of_which_decayed_is_seen(tmp_path: Path) -> None:
    """With six of eight channels tiny the median is tiny too, and hides none of them."""
    found = _found(tmp_path, network(weight=[1e-9] * 6 + [1.0] * 2, bias=[-0.1] * 8))
    assert found.layers[0].decayed == [0, 1, 2, 3, 4, 5]


def test_the_end_of_a_residual_block_feeds_no_relu(tmp_path: Path) -> None:
    """A zero scale there, and in a shortcut, is constant: what is added to still varies."""
    block: dict[str, Raw] = {}
    for number in (1, 2):
        block[f"layer1.0.conv{number}.weight"] = f32(rows(4, 9), 4, 1, 3, 3)
        block |= batchnorm(f"layer1.0.bn{number}", 4, weight=[0.0, 1, 1, 1], bias=[-0.1] * 4)
    block["layer1.0.downsample.0.weight"] = f32(rows(4, 1), 4, 1, 1, 1)
    block |= batchnorm("layer1.0.downsample.1", 4, weight=[0.0, 1, 1, 1], bias=[-0.1] * 4)
    found = {one.batchnorm.name: one for one in _found(tmp_path, block).layers}
    assert found["layer1.0.bn1"].dead == [0]
    assert found["layer1.0.bn2"].dead == []
    assert found["layer1.0.bn2"].flat == [0]
    assert found["layer1.0.downsample.1"].flat == [0]
    assert found["layer1.0.downsample.1"].batchnorm.producer == "layer1.0.downsample.0"


def test_a_norm_before_its_convolution_is_not_paired_with_it(tmp_path: Path) -> None:
    """Where ``bn1`` has the size of the inputs of ``conv1``, nothing follows from its rows."""
    tensors = {
        "block.0.conv1.weight": f32(rows(8, 4), 8, 4, 1, 1),
        **batchnorm("block.0.bn1", 4),
        "block.1.conv1.weight": f32([0.0] * 8 + rows(7, 8), 8, 8, 1, 1),
        **batchnorm("block.1.bn1", 8, bias=[-0.1] * 8),
    }
    found = _found(tmp_path, tensors)
    assert [one.batchnorm.producer for one in found.layers] == [None, None]
    assert [one.dead for one in found.layers] == [[], []]
    assert _kinds(found) == [("info", "zero_filters", "block.1.conv1.weight")]


ZEROS = f32([0.0] * 16, 4, 4)


@pytest.mark.parametrize(
    ("name", "tensor", "severity"),
    [
        ("fc.weight", ZEROS, "warning"),
        ("encoder.embedding", ZEROS, "warning"),
        ("layer.lora_B.default.weight", ZEROS, "info"),
        ("input_blocks.zero_conv.weight", ZEROS, "info"),
        ("block.adaLN_modulation.1.weight", ZEROS, "info"),
        ("attn.relative_position_cache", ZEROS, "info"),
        ("memory", f32([0.0] * 9), "info"),
        ("fc.bias", f32([0.0] * 9), None),
        ("scale", f32([0.0], 1), None),
    ],
)
def test_which_zeros_are_a_fault(
    name: str, tensor: Raw, severity: str | None, tmp_path: Path
) -> None:
    """A zeroed weight is a warning; buffers and layers that begin at zero are not."""
    found = _found(tmp_path, {name: tensor, "other.weight": f32(rows(3, 3), 3, 3)})
    expected = [] if severity is None else [(severity, "zero_tensor", name)]
    assert _kinds(found) == expected


def test_zero_scales_of_norms(tmp_path: Path) -> None:
    """Some zeros among ones are a warning; blocks that begin at zero, and scales less one, not."""
    scales = [1.0] * 30 + [0.0, 1e-9]
    found = _found(tmp_path, {"h.0.ln_1.weight": f32(scales), "h.0.ln_1.bias": f32([0.0] * 32)})
    assert _kinds(found) == [("warning", "norm_scale_zero", "h.0.ln_1.weight")]
    assert found.findings[0].attributes == {"count": 2}
    ones = {"a.norm.weight": f32([1.0] * 32)}
    fresh = {"norm.weight": f32([0.0] * 8), "norm.bias": f32([0.0] * 8), **ones}
    assert _kinds(_found(tmp_path, fresh)) == [("info", "norm_scale_zero", "norm.weight")]
    centred = {"input_layernorm.weight": f32([0.1, -0.2, 0.0, 0.3, -0.1])}
    found = _found(tmp_path, centred)
    assert found.findings == []
    assert "stored less one" in found.checkpoint.notes[0]
    (tmp_path / "config.json").write_text('{"model_type": "gemma2"}')
    assert _found(tmp_path, {"norm.weight": f32([0.0, 1.0, 1.0])}).findings == []


def test_zero_rows_of_weights_nobody_pairs(tmp_path: Path) -> None:
    """Pruned filters and unused embeddings are facts."""
    found = _found(tmp_path, {"wte.weight": f32([0.0] * 4 + rows(5, 4), 6, 4)})
    assert _kinds(found) == [("info", "zero_filters", "wte.weight")]
    assert found.findings[0].message == "1 of 6 rows are zero"


def _sharded(folder: Path, tensors: dict[str, Raw], listed: dict[str, str]) -> Path:
    folder.mkdir()
    for shard in sorted(set(listed.values())):
        mine = {name: one for name, one in tensors.items() if listed.get(name) == shard}
        if mine:
            write(folder / shard, mine)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return folder


def test_a_folder_of_shards(tmp_path: Path) -> None:
    """Shards are read together; what the index lists and no shard has is critical."""
    tensors = network()
    listed = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    found = check(_sharded(tmp_path / "whole", tensors, listed))
    assert found.findings == []
    assert len(found.checkpoint.files) == 2
    listed |= {"lost.weight": "model-1.safetensors", "gone.weight": "model-9.safetensors"}
    found = check(_sharded(tmp_path / "part", tensors, listed))
    assert _kinds(found) == [
        ("critical", "missing_tensors", "model-1.safetensors"),
        ("critical", "missing_tensors", "model-9.safetensors"),
    ]
    assert "the shard is not there" in found.findings[1].message


def test_a_folder_with_two_candidates_is_asked_about(tmp_path: Path) -> None:
    """Nobody guesses which file is meant."""
    write(tmp_path / "a.safetensors", network())
    write(tmp_path / "b.safetensors", network())
    done = CliRunner().invoke(cli, ["check", str(tmp_path)])
    assert done.exit_code == 2
    assert "name one (a.safetensors, b.safetensors)" in done.stderr
    assert CliRunner().invoke(cli, ["check", str(tmp_path / "none")]).exit_code == 2


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("wrapper", [(), ("state_dict",), ("model", "module")])
def test_torch_files_are_read_as_the_same_weights(
    *, zipped: bool, wrapper: tuple[str, ...], tmp_path: Path
) -> None:
    """Both formats of torch, wrapped by training programs or not, give what safetensors gives."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    state: Any = {f"module.{name}": value for name, value in model.state_dict().items()}
    state["module.0.weight"][2] = 0
    state["module.0.bias"][2] = 0
    state["module.1.bias"][:] = -0.5
    save_file(state, tmp_path / "m.safetensors")
    for key in reversed(wrapper):
        state = {key: state, "epoch": 3}
    torch.save(state, tmp_path / "m.pt", _use_new_zipfile_serialization=zipped)
    theirs, ours = check(tmp_path / "m.pt"), check(tmp_path / "m.safetensors")
    assert theirs.checkpoint.wrapper == ".".join(wrapper)
    assert _kinds(theirs) == _kinds(ours) == [("info", "dead_channels", "1")]
    assert theirs.layers[0].batchnorm.producer == "0"
    for name, facts in ours.facts.items():
        other = theirs.facts[name]
        assert (facts.lo, facts.hi, facts.norm) == (other.lo, other.hi, other.norm)


@pytest.mark.filterwarnings("ignore:.*Sparse:UserWarning")
def test_odd_tensors_of_torch_files(tmp_path: Path) -> None:
    """Strided, complex and whole-number tensors are read; sparse ones are noted."""
    turned = torch.randn(4, 6).t()
    state = {
        "turned.weight": turned,
        "last.weight": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "waves": torch.full((3,), complex(1, NAN)),
        "steps": torch.tensor(7),
        "sparse": torch.eye(3).to_sparse(),
        "empty.weight": torch.zeros(0, 3),
    }
    torch.save(state, tmp_path / "m.pt")
    found = check(tmp_path / "m.pt")
    assert _kinds(found) == [("critical", "nonfinite", "waves")]
    assert "sparse" in found.checkpoint.notes[0]
    peaks = found.facts["turned.weight"].peaks
    assert peaks is not None
    assert list(peaks) == turned.abs().amax(1).tolist()


@pytest.mark.parametrize(("many", "size"), [(1, 1), (5000, 3), (3, 100_000), (70, 130_000)])
def test_rows_are_measured_as_torch_measures_them(many: int, size: int, tmp_path: Path) -> None:
    """Whatever the shape, across the bounds of a call: peaks, range, norm, counts."""
    weight = torch.randn(many, size)
    weight[-1, -1] = INF
    save_file({"a.weight": weight}, tmp_path / "m.safetensors")
    facts = check(tmp_path / "m.safetensors").facts["a.weight"]
    assert facts.peaks is not None
    assert list(facts.peaks) == weight.abs().amax(1).tolist()
    finite = weight[weight.isfinite()]
    assert facts.finite == finite.numel() == many * size - 1
    assert facts.infinite == 1
    if finite.numel():
        assert (facts.lo, facts.hi) == (finite.min().item(), finite.max().item())
        assert facts.norm == pytest.approx(finite.double().norm().item(), rel=1e-9)


def test_json_is_strict_and_whole(tmp_path: Path) -> None:
    """A program gets all of it, whatever the file holds."""
    tensors = changed(network(), "fc.weight", {0: NAN, 1: INF})
    base = write(tmp_path / "base.safetensors", network())
    path = write(tmp_path / "model.safetensors", tensors)
    done = CliRunner().invoke(cli, ["check", str(path), "--against", str(base), "--json"])
    assert done.exit_code == 1

    def never(text: str) -> None:
        raise AssertionError(text)

    told = json.loads(done.stdout, parse_constant=never)
    assert told["severity_counts"] == {"critical": 1, "warning": 0, "info": 1}
    assert told["failed"] is True
    assert told["diff"]["changed"] == [{"tensor": "fc.weight", "change": None, "abs_change": None}]


@pytest.mark.parametrize(("gate", "status"), [("critical", 0), ("warning", 1), ("never", 0)])
def test_the_gate_decides_the_status(gate: str, status: int, tmp_path: Path) -> None:
    """A warning fails the gate for warnings only."""
    path = write(tmp_path / "model.safetensors", {"fc.weight": ZEROS})
    assert CliRunner().invoke(cli, ["check", str(path), "--fail-on", gate]).exit_code == status
