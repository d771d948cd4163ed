"""Two records side by side, and what a gate makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cirron_otel.errors import RecordError
from cirron_otel.training_record.comparing.diff import diff
from record_by_hand import CONFIG, RecordWriter, healthy, lesioned


def kinds(regressions: list[object]) -> list[tuple[str, str | None]]:
    """Kind and layer of each regression."""
    return [(item.kind, item.layer) for item in regressions]


def with_losses(directory: Path, losses: list[float], every: int = 5) -> Path:
    """A finished record with these losses."""
    writer = RecordWriter(directory)
    for check, loss in enumerate(losses):
        writer.row(check * every, loss, {"fc": 0.2})
    return writer.end()


def test_a_record_is_the_same_as_itself(tmp_path: Path) -> None:
    """Nothing differs between a record and its copy, whenever they were written."""
    found = diff(healthy(tmp_path / "a").end(), healthy(tmp_path / "b").end())
    assert found.verdict == "same"
    assert found.differences == []
    assert found.regressions == []
    assert not found.fails("regression")
    assert not found.fails("difference")
    assert found.loss.common == 20
    assert found.same_architecture is True


def test_a_lesion_is_a_regression_by_layer(tmp_path: Path) -> None:
    """A new alarm and newly stuck channels are named with their layer."""
    found = diff(healthy(tmp_path / "a").end(), lesioned(tmp_path / "b", mend=False))
    assert found.verdict == "regression"
    assert kinds(found.regressions) == [("alarm", "conv"), ("stuck", "conv"), ("loss", None)]
    (change,) = found.layers
    assert (change.layer, change.health) == ("conv", "worse")
    assert change.new == ["no gradient", "stuck channels"]
    assert found.fails("regression")
    assert not found.fails("never")


def test_the_way_back_is_better(tmp_path: Path) -> None:
    """What is gone in the second record is fixed, and passes a gate for regressions."""
    found = diff(lesioned(tmp_path / "a", mend=False), healthy(tmp_path / "b").end())
    assert found.verdict == "better"
    assert found.regressions == []
    assert found.layers[0].fixed == ["no gradient", "stuck channels"]
    assert found.fails("difference")
    assert not found.fails("regression")


def test_how_a_layer_ended_counts_before_how_bad_it_was(tmp_path: Path) -> None:
    """A lesion that was repaired is better than one that stayed."""
    found = diff(lesioned(tmp_path / "a", mend=False), lesioned(tmp_path / "b", mend=True))
    assert [(item.layer, item.health) for item in found.layers] == [("conv", "better")]
    assert found.regressions == []


@pytest.mark.parametrize(("factor", "fails"), [(1.04, False), (1.06, True), (0.5, False)])
def test_the_loss_may_rise_by_the_tolerance(tmp_path: Path, factor: float, *, fails: bool) -> None:
    """Up to the tolerance a higher loss is a difference, beyond it a regression."""
    a = with_losses(tmp_path / "a", [2.0] * 20)
    b = with_losses(tmp_path / "b", [2.0] * 10 + [2.0 * factor] * 10)
    found = diff(a, b)
    assert [item.kind for item in found.regressions] == (["loss"] if fails else [])
    assert found.loss.first_difference == 50
    assert found.loss.largest == pytest.approx(abs(2.0 * factor - 2.0))
    assert found.loss.mean_b == pytest.approx(2.0 * factor)
    assert diff(a, b, loss_tolerance=0.1).regressions == []


def test_a_loss_below_zero_is_judged_by_its_size(tmp_path: Path) -> None:
    """A rise from a negative loss is a rise: the tolerance is a share of its size."""
    a, b = with_losses(tmp_path / "a", [-2.0] * 20), with_losses(tmp_path / "b", [-1.0] * 20)
    assert [item.kind for item in diff(a, b).regressions] == ["loss"]
    assert diff(b, a).regressions == []


def test_losses_are_compared_at_the_same_steps(tmp_path: Path) -> None:
    """Runs that were checked at other steps are compared where they meet; a shorter one too."""
    falling = [3.0 - 0.01 * check for check in range(200)]
    a = with_losses(tmp_path / "a", falling, every=1)
    b = with_losses(tmp_path / "b", falling[:100:10], every=10)
    found = diff(a, b)
    assert found.loss.common == 10
    assert found.loss.first_difference is None
    assert (found.loss.first_step, found.loss.last_step) == (0, 90)
    # It is shorter, so that its end is no measure: at the same steps it is as good.
    assert found.regressions == []


def test_a_loss_that_broke_is_a_regression(tmp_path: Path) -> None:
    """NaN where there was a number."""
    b = RecordWriter(tmp_path / "b")
    b.row(0, 2.0, {"fc": 0.2})
    b.event("nonfinite_loss", step=5, severity="critical", value="nan")
    b.event("nonfinite_gradient", step=5, severity="critical", layers=["fc"])
    b.row(5, None, {"fc": None}, nonfinite={"loss": "nan", "grad.fc": "nan"})
    found = diff(with_losses(tmp_path / "a", [2.0, 2.0]), b.end())
    assert kinds(found.regressions) == [("nonfinite", None), ("nonfinite", "fc")]
    assert found.loss.first_difference == 5


def test_an_unfinished_run_is_a_regression(tmp_path: Path) -> None:
    """A run that crashed, failed or was interrupted is worse than one that came to its end."""
    a = healthy(tmp_path / "a").end()
    crashed = diff(a, healthy(tmp_path / "b").stop())
    assert kinds(crashed.regressions) == [("unfinished", None)]
    failed = diff(a, healthy(tmp_path / "c").end(error="ValueError: x"))
    assert "ValueError" in failed.regressions[0].message
    interrupted = diff(a, healthy(tmp_path / "d").end(interrupted=True))
    assert "interrupted" in interrupted.regressions[0].message
    # A record without an end does not verify, whatever it is compared with.
    assert diff(tmp_path / "b", tmp_path / "b").fails("regression")


@pytest.mark.parametrize("which", ["a", "b"])
def test_a_record_that_fails_verification_leads(tmp_path: Path, which: str) -> None:
    """Whichever record was changed, the verdict is that they cannot be compared."""
    healthy(tmp_path / "a").end()
    healthy(tmp_path / "b").end()
    diary = tmp_path / which / "diary.jsonl"
    diary.write_text(diary.read_text().replace('"parameters": 1466', '"parameters": 1467'))
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.verdict == "unverified"
    assert found.regressions[0].kind == "verification"
    assert found.fails("regression")


def test_settings_and_surroundings_that_differ_are_named(tmp_path: Path) -> None:
    """Optimizer and configuration key by key; a key that only one has, too."""
    a = healthy(tmp_path / "a").end()
    start = {
        "optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9},
        "config": {**CONFIG, "sigma": 3.0},
        "torch": "2.14.0",
        "architecture_sha256": "cd" * 32,
    }
    found = diff(a, healthy(tmp_path / "b", **start).end())
    assert [(item.name, item.a, item.b) for item in found.config] == [
        ("optimizer.lr", 0.05, 0.1),
        ("optimizer.momentum", None, 0.9),
        ("config.sigma", 2.5, 3.0),
    ]
    assert [item.name for item in found.environment] == ["torch"]
    assert found.same_architecture is False
    assert found.verdict == "different"


def test_a_new_finding_is_a_regression(tmp_path: Path) -> None:
    """Findings in metrics rows count, unless they are for information only."""

    def made(name: str, severity: str | None) -> Path:
        writer = RecordWriter(tmp_path / name)
        finding = {"kind": "stale", "severity": severity, "layer": "fc", "message": "m"}
        writer.row(0, 1.0, {"fc": 0.1}, findings=[finding] if severity else [])
        return writer.end()

    a = made("a", None)
    assert kinds(diff(a, made("b", "warning")).regressions) == [("finding", "fc")]
    assert diff(a, made("c", "info")).regressions == []


def test_not_scanned_is_not_zero(tmp_path: Path) -> None:
    """Channels that only one run scanned are neither better nor worse."""

    def made(name: str, stuck: dict[str, object]) -> Path:
        writer = RecordWriter(tmp_path / name)
        writer.row(0, 1.0, {"fc": 0.1}, stuck)
        return writer.end()

    found = diff(made("a", {}), made("b", {"fc": [0, 0, 0, 0]}))
    assert [item.health for item in found.layers] == ["changed"]
    assert found.layers[0].a["stuck_at_end"] is None
    assert found.layers[0].b["stuck_at_end"] == 0
    assert found.regressions == []


def test_the_data_and_text_forms_say_the_same(tmp_path: Path) -> None:
    """Strict JSON with verdict and reasons; text that names each regression and its layer."""
    found = diff(healthy(tmp_path / "a").end(), lesioned(tmp_path / "b", mend=False))
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert told["verdict"] == "regression"
    assert [item["kind"] for item in told["regressions"]] == ["alarm", "stuck", "loss"]
    assert told["a"]["status"] == "healthy"
    text = "\n".join(found.text())
    for item in found.regressions:
        assert item.message in text
    assert text.splitlines()[0] == "by hand → by hand: the second run is worse"


def test_bad_arguments_are_clear_errors(tmp_path: Path) -> None:
    """A gate that does not exist, a tolerance that is none, a record that is not there."""
    a = healthy(tmp_path / "a").end()
    with pytest.raises(ValueError, match="never, regression or difference"):
        diff(a, a).fails("worse")
    with pytest.raises(ValueError, match="loss_tolerance"):
        diff(a, a, loss_tolerance=-1)
    with pytest.raises(RecordError, match="nowhere"):
        diff(a, tmp_path / "nowhere")
