"""What vLLM's outputs say: tokens, why they end, and what the engine measured.

Pure functions on ``RequestOutput`` and what looks like it; vLLM is not imported.
"""

from __future__ import annotations

from cirron_otel import semconv
from cirron_otel.serving.facts import Facts, count_of, field, text_of

_MAX_REASONS = 64


def read_output(facts: Facts, thing: object) -> bool:
    """A ``RequestOutput``: the whole answer so far, or only what is new in it."""
    facts.operation = facts.operation or "text_completion"
    facts.provider = facts.provider or "vllm"
    facts.response_id = text_of(field(thing, "request_id")) or facts.response_id
    prompt = field(thing, "prompt_token_ids")
    if isinstance(prompt, (list, tuple)):
        facts.input_tokens = len(prompt)
    cached = count_of(field(thing, "num_cached_tokens"))
    facts.cache_read = facts.cache_read if cached is None else cached
    reasons: list[str] = []
    for output in field(thing, "outputs"):
        _read_sequence(facts, output)
        reason = text_of(field(output, "finish_reason"))
        if reason is not None and len(reasons) < _MAX_REASONS:
            reasons.append(reason)
    facts.finish_reasons = reasons or facts.finish_reasons
    if facts.sequences:
        facts.output_tokens = sum(seen[0] for seen in facts.sequences.values())
    metrics = field(thing, "metrics")
    if metrics is not None:
        _read_times(facts, metrics)
    return True


#: So many ids tell an answer that was sent again from a new part of it.
_FIRST = 8


def _read_sequence(facts: Facts, output: object) -> None:
    ids = field(output, "token_ids")
    index = count_of(field(output, "index")) or 0
    try:
        length, first = len(ids), list(ids[:_FIRST])
    except TypeError:
        return
    known, before, grew = facts.sequences.get(index, (0, first, False))
    again = first[: len(before)] == before
    if facts.in_parts is not None:
        whole = not facts.in_parts
    else:
        # One token after another looks the same in parts; the end may come with the last one again.
        whole = again and (length > known or (grew and length == known))
    if whole or not known:
        facts.sequences[index] = (length, first, bool(known))
    else:
        facts.sequences[index] = (known + length, before, False)


#: What is measured between which two times, by their names in ``RequestStateStats`` (the present
#: engine; what ends in ``_ts`` is of one monotonic clock) and in ``RequestMetrics``.
_LATENCIES = (
    (semconv.LATENCY_QUEUE, "queued_ts", "scheduled_ts"),
    (semconv.LATENCY_PREFILL, "scheduled_ts", "first_token_ts"),
    (semconv.LATENCY_DECODE, "first_token_ts", "last_token_ts"),
    (semconv.LATENCY_INFERENCE, "scheduled_ts", "last_token_ts"),
    (semconv.LATENCY_QUEUE, "arrival_time", "first_scheduled_time"),
    (semconv.LATENCY_PREFILL, "first_scheduled_time", "first_token_time"),
    (semconv.LATENCY_DECODE, "first_token_time", "last_token_time"),
    (semconv.LATENCY_INFERENCE, "first_scheduled_time", "last_token_time"),
    (semconv.LATENCY_FIRST_TOKEN, "arrival_time", "first_token_time"),
    (semconv.LATENCY_E2E, "arrival_time", "finished_time"),
)
#: What is measured already.
_LENGTHS = (
    (semconv.LATENCY_QUEUE, "time_in_queue"),
    (semconv.LATENCY_FIRST_TOKEN, "first_token_latency"),
)


def _read_times(facts: Facts, metrics: object) -> None:
    """Seconds, where both times are known; a time that has not come yet is 0 or None."""
    for name, begin, end in _LATENCIES:
        begun, ended = _seconds(metrics, begin), _seconds(metrics, end)
        if 0 < begun <= ended:
            facts.engine[name] = ended - begun
    for name, length in _LENGTHS:
        found = _seconds(metrics, length)
        if found > 0:
            facts.engine[name] = found
    generated = count_of(field(metrics, "num_generation_tokens"))
    if generated and len(facts.sequences) <= 1:  # of several it is one's own
        facts.output_tokens = generated


def _seconds(metrics: object, name: str) -> float:
    value = field(metrics, name)
    return float(value) if type(value) in {int, float} else 0.0
