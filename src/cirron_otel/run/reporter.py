"""Progress for those who look on: one line in the terminal, and Kubeflow Trainer's status server.

Both may be slow (a terminal that was stopped, a server that hangs), so they have a thread of their
own, a daemon, which is there only where one of them is wanted.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cirron_otel.flush_thread import THREAD_NAME as FLUSH_THREAD
from cirron_otel.run.outcome import COMPLETED
from cirron_otel.run.status_line import StatusLine

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder
    from cirron_otel.run.progress import Progress

THREAD_NAME = "cirron-otel-progress"
#: Seconds between two lines, and between two messages to a server.
LINE_EVERY_S = 1.0
SEND_EVERY_S = 5.0
_TIMEOUT_S = 5.0
#: How long the last message may hold up the end of the program.
_LAST_S = 1.0
#: How long taking the line off the terminal may.
_GONE_S = 0.2
#: Kubeflow's variables, of the versions there are.
_VARIABLES = ("KUBEFLOW_TRAINER_STATUS", "KUBEFLOW_TRAINER_SERVER")
#: Set to switch off what transformers itself reports.
_OFF = "DISABLE_KUBEFLOW_INTEGRATION"


class Reporter:
    """The thread, where something is to be reported; nothing at all else."""

    def __init__(
        self, rec: Recorder, progress: Progress, environ: Mapping[str, str] | None = None
    ) -> None:
        self._rec = rec
        self._progress = progress
        self._done = threading.Event()
        self._outcome = ""
        self._sent_s = 0.0
        self._told: dict[str, Any] | None = None
        is_first = rec.rank == 0
        self._server = Kubeflow.of(os.environ if environ is None else environ) if is_first else None
        self._shows = is_first and rec.settings.terminal == "progress"
        self._line = StatusLine(sys.stderr if self._shows else None)
        self._thread: threading.Thread | None = None
        if self._server is not None or self._shows:
            self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
            self._thread.start()

    def stop(self, outcome: str) -> None:
        """Report the end; waits for the last message for 1 s at most.

        On the flush thread, where a signal waits for what is still to be written, only until the
        line is off the terminal.
        """
        self._outcome = outcome
        self._done.set()
        if self._thread is None:
            return
        if threading.current_thread().name != FLUSH_THREAD:
            self._thread.join(_LAST_S)
        elif self._shows:
            self._thread.join(_GONE_S)

    def _run(self) -> None:
        while not self._done.wait(LINE_EVERY_S):
            self._guarded()
        self._sent_s = 0.0
        self._guarded()

    def _guarded(self) -> None:
        try:
            if self._shows:
                self._show()
            if self._server is not None:
                self._send(self._server)
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.repeat_warning("progress", f"progress cannot be reported: {error!r}")

    def _show(self) -> None:
        if self._done.is_set():
            self._line.clear()
            return
        line = self._progress.line()
        if line:
            self._line.show(line)

    def _send(self, server: Kubeflow) -> None:
        now = time.monotonic()
        plan = self._progress.plan
        if now - self._sent_s < SEND_EVERY_S or plan is None or self._is_reported_by_others():
            return
        fraction, eta = plan.fraction(), self._progress.eta()
        if self._outcome == COMPLETED:
            fraction, eta = 1.0, 0.0
        status: dict[str, Any] = {
            "metrics": [
                {"name": name, "value": str(value)}
                for name, value in (("epoch", plan.epoch), ("step", plan.step))
            ]
        }
        if fraction is not None:
            status["progressPercentage"] = int(100 * fraction)
        if eta is not None:
            status["estimatedRemainingSeconds"] = int(eta)
        if status == self._told:
            return
        self._sent_s = now
        server.send(status)
        self._told = status

    def _is_reported_by_others(self) -> bool:
        """Whether a Trainer of transformers reports to the same server itself."""
        module = sys.modules.get("transformers.integrations.integration_utils")
        if not hasattr(module, "KubeflowCallback") or os.environ.get(_OFF, "").upper() in {
            "TRUE", "1",
        }:  # fmt: skip
            return False
        frameworks = {
            scope.attrs.get("framework") for scope in list(self._rec.open.values()) if scope.attrs
        }
        return "transformers" in frameworks


class Kubeflow:
    """Kubeflow Trainer's status server of this job, as its variables name it. One thread."""

    def __init__(self, url: str, token_file: str, certificate: str | None) -> None:
        self.url = url
        self._token_file = Path(token_file)
        self._certificate = certificate
        self._pool: Any = None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Kubeflow | None:
        """The server that the environment names; None where there is none."""
        for name in _VARIABLES:
            url, token = environ.get(f"{name}_URL"), environ.get(f"{name}_TOKEN")
            if url and token:
                return cls(url, token, environ.get(f"{name}_CA_CERT") or None)
        return None

    def send(self, status: Mapping[str, Any]) -> None:
        """Send the state of the training; raises what the network or the server has against it."""
        import urllib3  # noqa: PLC0415 - only where there is a server

        if self._pool is None:
            self._pool = urllib3.PoolManager(
                ca_certs=self._certificate,
                cert_reqs="CERT_REQUIRED",
                timeout=_TIMEOUT_S,
                retries=False,
            )
        # Kubernetes renews the token in the file.
        token = self._token_file.read_text("utf-8").strip()
        body = {"trainerStatus": {"lastUpdatedTime": datetime.now(UTC).isoformat(), **status}}
        answer = self._pool.request(
            "POST",
            self.url,
            body=msgspec.json.encode(body),
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        )
        if answer.status >= 400:  # noqa: PLR2004 - as HTTP has it
            raise OSError(f"the status server answered {answer.status}")
