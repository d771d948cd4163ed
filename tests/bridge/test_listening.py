"""Who listens to scopes hears of each that becomes current, whoever makes their spans."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry import trace as otel_trace
from opentelemetry.sdk.trace import TracerProvider

import cirron_otel as ci
from cirron_otel import recorder
from cirron_otel.scope_base import BaseScope


class Heard:
    """A listener that keeps what it hears, and fails now and then."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def opened(self, scope: BaseScope) -> None:
        """Keep one line."""
        self.lines.append(f"+{scope.name}")

    def closed(self, scope: BaseScope) -> None:
        """Keep one line."""
        self.lines.append(f"-{scope.name}")


@pytest.mark.parametrize("joined", [False, True], ids=["own", "joined"])
def test_listeners_hear_of_every_scope(joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    """They are told while they listen, in order; afterwards scopes take the short way again."""
    if joined:
        provider = TracerProvider()
        monkeypatch.setattr(otel_trace, "get_tracer_provider", lambda: provider)
    ci.profile(frameworks=[])
    rec: Any = recorder._current
    heard = Heard()
    errors: list[tuple[str, str]] = []
    rec.listening.at_error.append(lambda scope, exc: errors.append((scope.name, str(exc))))
    with ci.scope("before"):
        pass
    rec.listen(heard)
    assert rec.detour
    for _ in ci.epochs(range(1)):
        for _ in ci.batches(range(1)):
            with pytest.raises(ValueError, match="x"), ci.scope("outer"), ci.scope("inner"):
                raise ValueError("x")
    rec.listen_no_more(heard)
    assert not rec.detour
    with ci.scope("after"):
        pass
    ci.shutdown()
    assert [line for line in heard.lines if "data_load" not in line] == [
        "+epoch", "+step", "+outer", "+inner", "-inner", "-outer", "-step", "-epoch",
    ]  # fmt: skip
    assert errors == [("inner", "x"), ("outer", "x")]


def test_what_a_listener_raises_stays_with_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener of ours that fails is counted, and the program and its exceptions go on."""
    monkeypatch.delenv("CIRRON_OTEL_STRICT")

    class Broken:
        """A listener that always fails."""

        def opened(self, scope: BaseScope) -> None:
            """Fail."""
            raise RuntimeError(scope.name)

        closed = opened

    profiler = ci.profile(frameworks=[])
    rec: Any = recorder._current
    rec.listen(Broken())
    rec.listening.at_error.append(lambda *_: 1 / 0)
    rec.listening.at_end.append(lambda: 1 / 0)
    with pytest.raises(KeyError, match="theirs"), ci.scope("work"):
        raise KeyError("theirs")
    ci.shutdown()
    assert profiler.health()["swallowed_errors"] == {
        "listening.opened": 1,
        "listening.closed": 2,  # the session's end, too
        "listening.error": 1,
        "listening.end": 1,
    }
