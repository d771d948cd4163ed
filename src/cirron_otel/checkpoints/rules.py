"""What is said of a checkpoint: a finding for each thing that a person should know."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from cirron_otel.checkpoints.channels import MOST_LISTED, RELATIVE, Channels, usual
from cirron_otel.checkpoints.grouping import STATED
from cirron_otel.checkpoints.measuring import Facts, values_of
from cirron_otel.checkpoints.opening import Checkpoint
from cirron_otel.checkpoints.tables import Tensor
from cirron_otel.reading.values import counted

Severity = Literal["critical", "warning", "info"]
SEVERITIES: Final = ("critical", "warning", "info")
#: Within a severity, what to read first.
KINDS: Final = (
    "nonfinite", "missing_tensors", "identical_weights", "newly_dead", "dead_channels",
    "decayed_channels", "zero_tensor", "norm_scale_zero", "flat_channels", "dormant_channels",
    "collapsed_variance", "zero_filters", "frozen_tensors", "embedding_rows_unchanged",
)  # fmt: skip
#: Families that store a norm's scale less one, so that zero is the usual value.
_ZERO_CENTRED = re.compile(r"^(gemma|nemotron|qwen3_next|qwen3_5)")
#: Ordinary scales are nearly all positive.
_NEGATIVE_SHARE = 0.1
_WEIGHT = re.compile(r"(weight|kernel|embedding|proj|lora_A)", re.IGNORECASE)
_EMBEDDING = re.compile(r"embed|wte|wpe|word_|token|shared", re.IGNORECASE)
#: Layers that begin at zero on purpose, and stay there in parts that were not trained.
_BORN_ZERO = re.compile(
    r"lora_B|lora_up|lora_embedding_B|zero_conv|zero_module|controlnet_(down|mid)_block"
    r"|adaln|ada_ln|modulation|layer_scale|(^|\.)(gamma|gate|alpha|ls\d)(\.|$|_)",
    re.IGNORECASE,
)


class Finding(msgspec.Struct, frozen=True, gc=False):
    """Something a person should know of a checkpoint.

    ``kind`` is one of :data:`KINDS`; ``message`` a sentence that stands by itself; ``layer`` the
    tensor or layer it is about; ``attributes`` further facts.
    """

    kind: str
    severity: Severity
    message: str
    layer: str | None = None
    attributes: dict[str, Any] = {}


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """The gravest first; those of one kind in the order of the file."""
    return sorted(findings, key=lambda one: (SEVERITIES.index(one.severity), KINDS.index(one.kind)))


def of_values(
    checkpoint: Checkpoint,
    facts: Mapping[str, Facts],
    layers: Sequence[Channels],
    norms: Sequence[Tensor],
) -> Iterator[Finding]:
    """The findings that one checkpoint gives by itself."""
    yield from _nonfinite(facts)
    yield from _missing(checkpoint)
    for one in layers:
        yield from _of_channels(one)
    scales = {one.name for one in norms}
    yield from _zero_tensors(facts, layers, scales)
    yield from _norm_scales(checkpoint, norms)
    yield from _zero_filters(facts, layers)


def _nonfinite(facts: Mapping[str, Facts]) -> Iterator[Finding]:
    for name, one in facts.items():
        if one.nonfinite:
            odd = [
                f"{n:,} {word}" for n, word in ((one.nans, "NaN"), (one.infinite, "infinite")) if n
            ]
            yield Finding(
                "nonfinite",
                "critical",
                f"{' and '.join(odd)} of {counted(one.finite + one.nonfinite, 'value')}",
                name,
                {"nan": one.nans, "infinite": one.infinite},
            )


def _missing(checkpoint: Checkpoint) -> Iterator[Finding]:
    by_shard: dict[str, list[str]] = {}
    for name, shard in checkpoint.missing:
        by_shard.setdefault(shard, []).append(name)
    there = {path.name for path in checkpoint.files}
    for shard, names in by_shard.items():
        is_there = shard.rpartition("/")[2] in there
        why = "the shard has them not" if is_there else "the shard is not there"
        yield Finding(
            "missing_tensors",
            "critical",
            f"the index lists {counted(len(names), 'tensor')} in it, and {why}",
            shard,
            {"count": len(names), "tensors": names[:MOST_LISTED]},
        )


def _of_channels(found: Channels) -> Iterator[Finding]:
    norm = found.batchnorm
    known = norm.wiring == STATED
    severity: Severity = "warning" if known else "info"
    condition = "" if known else ", if a ReLU directly follows"
    of = f"of {counted(norm.channels, 'channel')}"
    where = {"batchnorm": norm.name, "layer": norm.producer, "wiring": norm.wiring}
    for kind, level, channels, text in (
        ("dead_channels", severity, found.dead,
         f"dead: constant, and at or below zero before the ReLU{condition}"),
        ("decayed_channels", severity, found.decayed,
         f"decayed to under {RELATIVE:g} of the layer's median, and shut{condition}"),
        ("flat_channels", "info", found.flat, "constant: they say the same of every input"),
        ("dormant_channels", "info", found.dormant,
         "open for hardly any input (beta + 3 |gamma| <= 0)" + condition),
    ):  # fmt: skip
        if channels:
            facts = {**where, "count": len(channels), "channels": channels[:MOST_LISTED]}
            yield Finding(kind, level, f"{len(channels):,} {of} {text}", norm.name, facts)
    if found.collapsed:
        yield Finding(
            "collapsed_variance",
            "info",
            f"{found.collapsed:,} {of} have a running variance of zero: their input did not vary",
            norm.name,
            {**where, "count": found.collapsed},
        )


def _zero_tensors(
    facts: Mapping[str, Facts], layers: Sequence[Channels], scales: set[str]
) -> Iterator[Finding]:
    norms = {one.batchnorm.name for one in layers}
    for name, one in facts.items():
        module, _, leaf = name.rpartition(".")
        if (
            not one.is_zero
            or one.finite == 1
            or name in scales
            or module in norms
            or leaf.endswith(("bias", "running_mean", "running_var"))
        ):
            continue
        on_purpose = _BORN_ZERO.search(name)
        weight = len(one.tensor.shape) > 1 and _WEIGHT.search(leaf)
        if weight and not on_purpose:
            yield Finding("zero_tensor", "warning", "every value is zero", name)
        else:
            why = "such layers begin at zero" if on_purpose else "it may be a buffer"
            yield Finding("zero_tensor", "info", f"every value is zero; {why}", name)


def _norm_scales(checkpoint: Checkpoint, norms: Sequence[Tensor]) -> Iterator[Finding]:
    if _ZERO_CENTRED.match(checkpoint.model_type):
        return
    scales = {one.name: values_of(one) for one in norms}
    negative = sum(value < 0 for values in scales.values() for value in values)
    if negative > _NEGATIVE_SHARE * sum(map(len, scales.values())):
        checkpoint.notes.append(
            "many scales of norms are negative, so they are taken to be stored less one: zero is "
            "no fault there"
        )
        return
    for name, values in scales.items():
        small = RELATIVE * usual([abs(value) for value in values])
        count = sum(abs(value) <= small for value in values if math.isfinite(value))
        if not count:
            continue
        whole = count == len(values)
        if whole and _shift_is_zero(checkpoint, name):
            message = "every scale and every shift is zero, as where a block begins at zero"
            yield Finding("norm_scale_zero", "info", message, name, {"count": count})
        else:
            message = f"{count:,} of {counted(len(values), 'scale')} are zero or as good as zero"
            yield Finding("norm_scale_zero", "warning", message, name, {"count": count})


def _shift_is_zero(checkpoint: Checkpoint, name: str) -> bool:
    module = name.rpartition(".")[0]
    shift = checkpoint.tensors.get(f"{module}.bias") or checkpoint.tensors.get(f"{module}.beta")
    return shift is not None and shift.is_float and not any(values_of(shift))


def _zero_filters(facts: Mapping[str, Facts], layers: Sequence[Channels]) -> Iterator[Finding]:
    paired = {f"{one.batchnorm.producer}.weight" for one in layers}
    for name, one in facts.items():
        if one.peaks is None or name in paired or one.is_zero:
            continue
        count = sum(peak == 0 for peak in one.peaks)
        if count:
            what = "row" if _EMBEDDING.search(name) or len(one.tensor.shape) == 2 else "filter"  # noqa: PLR2004 - a matrix
            message = f"{count:,} of {counted(len(one.peaks), what)} are zero"
            yield Finding("zero_filters", "info", message, name, {"count": count})
