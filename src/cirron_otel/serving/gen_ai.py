"""What OpenTelemetry's convention for generative AI has a request say: attributes and span name.

``gen_ai.operation.name`` and ``gen_ai.provider.name`` are always there, because views of language
models do not see a span without them; everything else only where somebody said it. In the spool
the scope keeps the name ``request``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cirron_otel import semconv
from cirron_otel.joined import JoinedScope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cirron_otel.scope_base import BaseScope
    from cirron_otel.serving.state import RequestState
    from cirron_otel.serving.usage import Facts

#: What is said where nobody says better: no result had a known shape, and the service named none.
OPERATION = "inference"
PROVIDER = "unknown"

_UNSAID = {semconv.GEN_AI_OPERATION: OPERATION, semconv.GEN_AI_PROVIDER: PROVIDER}

_FACTS = (
    (semconv.GEN_AI_RESPONSE_ID, "response_id"),
    (semconv.GEN_AI_RESPONSE_MODEL, "response_model"),
    (semconv.GEN_AI_INPUT_TOKENS, "input_tokens"),
    (semconv.GEN_AI_OUTPUT_TOKENS, "output_tokens"),
    (semconv.GEN_AI_CACHE_READ, "cache_read"),
    (semconv.GEN_AI_CACHE_WRITE, "cache_write"),
    (semconv.GEN_AI_REASONING, "reasoning"),
)


def start_attributes(
    *, model: str | None = None, operation: str | None = None, provider: str | None = None
) -> dict[str, Any]:
    """The attributes that a request has from its beginning."""
    attrs: dict[str, Any] = {
        semconv.GEN_AI_OPERATION: operation or OPERATION,
        semconv.GEN_AI_PROVIDER: provider or PROVIDER,
    }
    if model:
        attrs[semconv.GEN_AI_REQUEST_MODEL] = model
    return attrs


def span_name(attrs: Mapping[str, Any], name: str) -> str:
    """What the span of a request is called: its operation and its model, or a name of its own."""
    operation = attrs.get(semconv.GEN_AI_OPERATION)
    if name != semconv.REQUEST or not isinstance(operation, str):
        return name
    model = attrs.get(semconv.GEN_AI_REQUEST_MODEL)
    return f"{operation} {model}" if isinstance(model, str) else operation


def take_over(scope: BaseScope, given: Mapping[str, Any]) -> None:
    """Say on a middleware's request what the call that makes it its own was declared with.

    What was said of the request already stays.
    """
    attrs = dict(scope.attrs)
    for key, value in given.items():
        if attrs.get(key, _UNSAID.get(key)) == _UNSAID.get(key):
            attrs[key] = value
    scope.clean = None
    scope.attrs = attrs


def finish(state: RequestState) -> None:
    """Say on a request that is about to end what was learned of it. On the thread that ends it."""
    scope = state.scope
    attrs = dict(scope.attrs)
    facts = state.facts
    if facts is not None:
        _say_facts(attrs, facts)
    if state.is_stream:
        attrs[semconv.GEN_AI_REQUEST_STREAM] = True
    first = _first_s(state)
    if first is not None:
        attrs[semconv.GEN_AI_TIME_TO_FIRST_CHUNK] = first
    known = state.output_tokens()
    if known is not None and known[1]:
        attrs[semconv.GEN_AI_OUTPUT_TOKENS] = known[0]
        attrs[semconv.TOKENS_ESTIMATED] = True
    scope.clean = None
    scope.attrs = attrs
    if isinstance(scope, JoinedScope) and scope.exported:
        name = span_name(attrs, scope.name)
        if getattr(scope.span, "name", None) != name:
            scope.span.update_name(name)


def _say_facts(attrs: dict[str, Any], facts: Facts) -> None:
    for name, said, unsaid in (
        (semconv.GEN_AI_OPERATION, facts.operation, OPERATION),
        (semconv.GEN_AI_PROVIDER, facts.provider, PROVIDER),
    ):
        # What the service said itself counts.
        if said is not None and attrs.get(name, unsaid) == unsaid:
            attrs[name] = said
    for name, key in _FACTS:
        value = getattr(facts, key)
        if value is not None:
            attrs[name] = value
    if facts.finish_reasons:
        attrs[semconv.GEN_AI_FINISH_REASONS] = list(facts.finish_reasons)
    attrs.update(facts.engine)


def _first_s(state: RequestState) -> float | None:
    """Seconds to the first part of the answer, as the service sees it or as its engine does."""
    if state.first_ns is not None:
        return max(0, state.first_ns - state.start_ns) / 1e9
    facts = state.facts
    return None if facts is None else facts.engine.get(semconv.LATENCY_FIRST_TOKEN)
