"""Who this process is: its host, its run, its rank, and the job it is part of.

These are the OTel resource attributes of everything it records; names in
:mod:`cirron_otel.semconv`. Schedulers are recognised by the variables they set; nothing is asked
over a network.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cirron_otel import semconv, surroundings

if TYPE_CHECKING:
    from cirron_otel.settings import Settings

#: Launchers' words for "no id was given".
_NO_ID = frozenset({"", "none", "None"})

#: Resource attribute <- the environment variable that a scheduler or a pod spec sets.
_SCHEDULERS = {
    "slurm.job.id": "SLURM_JOB_ID",
    "slurm.job.name": "SLURM_JOB_NAME",
    "slurm.nodelist": "SLURM_JOB_NODELIST",
    "slurm.nnodes": "SLURM_JOB_NUM_NODES",
    "slurm.ntasks": "SLURM_NTASKS",
    "slurm.partition": "SLURM_JOB_PARTITION",
    "slurm.cluster.name": "SLURM_CLUSTER_NAME",
    semconv.K8S_NAMESPACE: "K8S_NAMESPACE",
    semconv.K8S_POD_NAME: "K8S_POD_NAME",
    semconv.K8S_POD_UID: "K8S_POD_UID",
    semconv.K8S_NODE: "K8S_NODE_NAME",
    "k8s.container.name": "K8S_CONTAINER_NAME",
    "k8s.job.name": "K8S_JOB_NAME",
    "k8s.job.uid": "K8S_JOB_UID",
}


def run_id(settings: Settings) -> str:
    """The run's id: given, else the one that the launcher gave all ranks, else a new one.

    ``TORCHELASTIC_RESTART_COUNT`` has no part in it: after a restart workers differ in it.
    """
    environ = os.environ
    for given in (
        settings.run_id,
        environ.get("TORCHELASTIC_RUN_ID"),
        environ.get("KUBEFLOW_TRAINING_JOB_ID"),
        environ.get("SLURM_JOB_ID"),
        environ.get("K8S_JOB_UID"),
        environ.get("K8S_JOB_NAME"),
    ):
        if given is not None and given not in _NO_ID:
            return given
    if settings.world_size > 1 and (shared := _shared_by_ranks(settings, environ)):
        return shared
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def _shared_by_ranks(settings: Settings, environ: Mapping[str, str]) -> str:
    """What every rank finds without talking to the others: their rendezvous and Ray's job.

    Ray numbers the jobs of each cluster from one, so that the number alone tells no two runs apart.
    Empty where there is nothing.
    """
    parts = []
    if job := environ.get("RAY_JOB_ID"):
        parts.append(f"ray-{job}")
    if address := environ.get("MASTER_ADDR"):
        parts.append(f"{address}-{environ.get('MASTER_PORT', '0')}")
        # One launcher starts all ranks of one machine, and another those of the next.
        several = environ.get("LOCAL_WORLD_SIZE", "") not in {"", str(settings.world_size)}
        if not job and not several:
            parts.append(str(os.getppid()))
    return "-".join(parts)


def host_name() -> str:
    """This host's name."""
    return socket.gethostname() or "localhost"


def program_name() -> str:
    """The running program's name: ``service.name`` unless OTel's own variables give one."""
    main = sys.argv[0] if sys.argv else ""
    stem = Path(main).stem
    if stem in ("", "-c", "-"):
        return "python"
    return Path(main).resolve().parent.name if stem == "__main__" else stem


def resource_attributes(settings: Settings, run: str) -> dict[str, Any]:
    """The resource attributes of this process.

    ``service.name`` is left to OTel's own variables where they name one.
    """
    environ: Mapping[str, str] = os.environ
    known: dict[str, Any] = {
        **surroundings.resource_attributes(settings.local_rank, environ),
        semconv.RUN_ID: run,
        semconv.SERVICE_INSTANCE_ID: f"{run}-rank{settings.rank}",
        semconv.HOST_NAME: host_name(),
        semconv.PROCESS_PID: os.getpid(),
        semconv.DL_RANK: settings.rank,
        semconv.DL_WORLD_SIZE: settings.world_size,
        semconv.DL_LOCAL_RANK: settings.local_rank,
        semconv.WORKSPACE_ID: settings.workspace_id,
        semconv.PIPELINE_ID: settings.pipeline_id,
        semconv.DEPLOYMENT_ID: settings.deployment_id,
        semconv.MODEL_ID: settings.model_id,
        **{
            name: environ[variable]
            for name, variable in _SCHEDULERS.items()
            if environ.get(variable)
        },
    }
    if not (
        environ.get("OTEL_SERVICE_NAME")
        or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    ):
        known[semconv.SERVICE_NAME] = program_name()
    return {name: value for name, value in known.items() if value is not None}
