"""Findings to a webhook: what ``profile(on_finding=ci.webhook(...))`` is given.

The thread that found something puts it into a bounded queue and goes on; what is not sent in the
end is counted with a reason, and is in the spool all the same.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec

from cirron_otel import recorder, semconv
from cirron_otel._guard import Guard
from cirron_otel.errors import ConfigurationError
from cirron_otel.findings import SEVERITIES, Finding, Outlet, Severity
from cirron_otel.webhook_line import Body, Counts, Line, Post, Sender

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder

#: Seconds that the end of the program may take where no recording says so.
EXIT_BUDGET_S: Final = 3.0
_SCHEMES = frozenset({"http", "https"})


def webhook(  # noqa: PLR0913 - one keyword each
    url: str,
    *,
    min_severity: Severity = "warning",
    headers: Mapping[str, str] | None = None,
    body: Body | None = None,
    timeout: float = 10.0,
    certificate: str | None = None,
) -> Webhook:
    """Make a function for ``on_finding=`` that posts findings to ``url`` as JSON.

    ``profile(on_finding=ci.webhook("https://hooks.example/..."))``, or in a list with others.
    What is posted is ``{"source", "text", "event", "run"}``: ``text`` one sentence, as Slack and
    Mattermost show it, ``event`` the finding's fields, ``run`` its run, rank and host. ``body`` may
    make something else of a :class:`~cirron_otel.findings.Finding`; it is called on the thread
    that sends.

    Findings below ``min_severity`` are left out. ``headers`` go along. ``timeout`` (seconds) is for
    connecting and for the answer; ``certificate`` names a PEM file of whom to trust. Proxies and
    certificates of the environment count. A receiver that does not answer, or answers 408, 429 or
    5xx, is tried again with growing pauses, for an hour at most.

    Calling it never blocks and never raises. Raises
    :class:`~cirron_otel.errors.ConfigurationError` for what cannot be used.
    """
    return Webhook(
        url, min_severity=min_severity, headers=headers, body=body, timeout=timeout,
        certificate=certificate,
    )  # fmt: skip


class Webhook(Outlet):
    """What :func:`webhook` makes. Any thread."""

    def __init__(  # noqa: PLR0913 - see webhook()
        self,
        url: str,
        *,
        min_severity: Severity,
        headers: Mapping[str, str] | None,
        body: Body | None,
        timeout: float,
        certificate: str | None,
    ) -> None:
        self.description = f"webhook {_place_of(url)}"
        self._least = _rank_of(min_severity)
        _check(headers, body, timeout)
        self._sender = Sender(url, dict(headers or {}), body, timeout, certificate)
        self._sender.connect().close()  # what is wrong with proxy or certificate is said now
        self._counts = Counts()
        #: For losses while nothing is recorded.
        self._guard = Guard()
        #: By process and number of ends so far: a fork, and an end, begin another one.
        self._lines: dict[tuple[int, int], Line] = {}
        self._ends = 0
        self._ends_by_itself = False

    def __call__(self, finding: Finding) -> None:
        """Take a finding in. Never blocks, never raises."""
        if finding.severity in SEVERITIES[: self._least]:
            return
        rec = recorder._current  # noqa: SLF001 - see recorder
        if rec is not None and not rec.active:
            rec = None
        guard = self._guard if rec is None else rec.guard
        try:
            if rec is not None and self not in rec.findings.outlets:
                rec.findings.outlets.append(self)
            self._line().put(Post(finding, _run_of(rec), guard, time.monotonic()))
        except Exception as error:  # noqa: BLE001 - see _guard
            guard.swallow("webhook", error)

    def _line(self) -> Line:
        """The line of this process, with its thread. No lock: a fork may come any time."""
        key = (os.getpid(), self._ends)
        line = self._lines.get(key)
        if line is None:
            if not self._ends_by_itself:
                self._ends_by_itself = True
                atexit.register(self._at_exit)
            line = self._lines.setdefault(key, Line(self._sender, self._counts, self.description))
            line.start()
        return line

    def _line_so_far(self) -> Line | None:
        return self._lines.get((os.getpid(), self._ends))

    def hurry(self) -> None:
        """The end is near: pauses are cut short."""
        if (line := self._line_so_far()) is not None:
            line.hurry()

    def end(self, deadline: float) -> None:
        """Send what waits until ``deadline`` (of ``time.monotonic()``), and count the rest."""
        if (line := self._lines.pop((os.getpid(), self._ends), None)) is not None:
            self._ends += 1
            line.end(deadline)

    def health(self) -> dict[str, Any]:
        """What ``ci.health()["findings"]["webhooks"]`` says of it."""
        line = self._line_so_far()
        return {
            "description": self.description,
            "waiting": 0 if line is None else line.waiting,
            **msgspec.structs.asdict(self._counts),
        }

    def _at_exit(self) -> None:
        rec = recorder._current  # noqa: SLF001 - see recorder
        if rec is not None and rec.active and self in rec.findings.outlets:
            return  # its own end waits for us, within its budget
        self.hurry()
        self.end(time.monotonic() + EXIT_BUDGET_S)

    def __repr__(self) -> str:
        """Without the path of the URL, which is the key to many a webhook."""
        return f"<{self.description}>"


# --- words ------------------------------------------------------------------------------------


def _run_of(rec: Recorder | None) -> dict[str, object] | None:
    if rec is None:
        return None
    host = rec.resource.attributes.get(semconv.HOST_NAME)
    return {"id": rec.run_id, "rank": rec.rank, "attempt": rec.run_state.attempt, "host": host}


def _place_of(url: object) -> str:
    """Scheme and host of a URL, for people; raises for what is no URL of a server."""
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        port = None if parts is None else parts.port
    except ValueError:
        parts = port = None
    printable = isinstance(url, str) and url.isascii() and url.isprintable() and " " not in url
    if not printable or parts is None or parts.scheme not in _SCHEMES or not parts.hostname:
        # It is not shown: the path of a webhook's URL is its key.
        raise ConfigurationError(
            "webhook(url=...) cannot be used: it must be a URL such as https://hooks.example/abc"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + ("" if port is None else f":{port}")


def _rank_of(severity: object) -> int:
    if severity not in SEVERITIES:
        raise ConfigurationError(
            f"webhook(min_severity={severity!r}): choose {', '.join(map(repr, SEVERITIES))}"
        )
    return SEVERITIES.index(severity)


def _check(headers: object, body: object, timeout: object) -> None:
    """Raise for what cannot be used."""
    good = isinstance(headers, Mapping) and all(
        isinstance(name, str) and isinstance(value, str) and f"{name}{value}".isprintable()
        for name, value in headers.items()
    )
    if headers is not None and not good:
        raise ConfigurationError("webhook(headers=...) must be a mapping from names to texts")
    if body is not None and not callable(body):
        raise ConfigurationError(
            f"webhook(body={body!r}) must be a function that makes of a Finding what is posted"
        )
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ConfigurationError(f"webhook(timeout={timeout!r}) must be seconds above 0")
