"""Where a process runs, as far as files tell: its pod, the commit of its program, its GPU.

These are OTel resource attributes like those of :mod:`cirron_otel.identity`; what is found here is
read from small local files, nothing is asked over a network or of a driver, and no program is run.
What ``OTEL_RESOURCE_ATTRIBUTES`` names is left to it.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cirron_otel import semconv

_ROOT = Path("/")
#: The names that specifications of pods commonly give these, beside OpenTelemetry's words.
_POD_VARIABLES = {
    semconv.K8S_POD_NAME: ("POD_NAME", "MY_POD_NAME"),
    semconv.K8S_NAMESPACE: ("POD_NAMESPACE", "MY_POD_NAMESPACE"),
    semconv.K8S_POD_UID: ("POD_UID", "MY_POD_UID"),
    semconv.K8S_NODE: ("NODE_NAME", "MY_NODE_NAME"),
}
_NAMESPACE_FILE = "var/run/secrets/kubernetes.io/serviceaccount/namespace"
#: The kubelet mounts files of the pod's own folder; with some drivers a cgroup bears the uid too.
_POD_UID = re.compile(
    r"(?:/pods/|[-/]pod)([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})"
)
#: What services that build and run jobs say of the commit.
_COMMIT_VARIABLES = (
    "GIT_COMMIT", "GITHUB_SHA", "CI_COMMIT_SHA", "BUILDKITE_COMMIT", "CIRCLE_SHA1",
    "BUILD_SOURCEVERSION", "BITBUCKET_COMMIT",
)  # fmt: skip
_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_MOST_BYTES = 1 << 20
_GPU_UUID = re.compile(r"^(?:GPU|MIG)-[0-9A-Za-z/-]+$")


def resource_attributes(
    local_rank: int, environ: Mapping[str, str] = os.environ, root: Path = _ROOT
) -> dict[str, Any]:
    """What can be told of this process's surroundings. Never raises; reads a few small files."""
    found: dict[str, str | None] = {}
    with contextlib.suppress(OSError, ValueError):  # a file that may not be read is none
        found.update(pod(environ, root))
    found[semconv.COMMIT] = program_commit(environ)
    with contextlib.suppress(OSError, ValueError):
        found[semconv.GPU_ID] = gpu_id(local_rank, environ, root)
    said = environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    named = {pair.partition("=")[0].strip() for pair in said.split(",")}
    return {name: value for name, value in found.items() if value and name not in named}


# --- the pod ------------------------------------------------------------------------------------


def pod(environ: Mapping[str, str], root: Path = _ROOT) -> dict[str, str | None]:
    """Name, namespace, uid and node of the pod; empty outside of Kubernetes."""
    if not environ.get("KUBERNETES_SERVICE_HOST"):
        return {}
    found = {
        name: next((environ[one] for one in variables if environ.get(one)), None)
        for name, variables in _POD_VARIABLES.items()
    }
    # A pod's host name is its own name, unless it is on the network of its node.
    found[semconv.K8S_POD_NAME] = found[semconv.K8S_POD_NAME] or environ.get("HOSTNAME")
    found[semconv.K8S_NAMESPACE] = found[semconv.K8S_NAMESPACE] or _text(root / _NAMESPACE_FILE)
    if found[semconv.K8S_POD_UID] is None:
        for name in ("proc/self/mountinfo", "proc/self/cgroup"):
            uid = _POD_UID.search(_text(root / name) or "")
            if uid is not None:
                found[semconv.K8S_POD_UID] = uid[1].replace("_", "-")
                break
    return found


# --- the commit ---------------------------------------------------------------------------------


def program_commit(environ: Mapping[str, str] = os.environ) -> str | None:
    """The :func:`commit` around the program. Never raises; reads a few small files."""
    # As above, and links that lead in a circle.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        return commit(program_directory(), environ)
    return None


def program_directory() -> Path | None:
    """Where the program lies; for one that was installed, the working directory."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main:
        path = Path(main).absolute()
        if not {"site-packages", "dist-packages"} & set(path.parts) and path.parent.name != "bin":
            return path.parent
    try:
        return Path.cwd()
    except OSError:
        return None


def commit(start: Path | None, environ: Mapping[str, str]) -> str | None:
    """The commit that is checked out in the repository around ``start``.

    Where there is none (an image holds no repository), what the environment says of it. Whether
    files were changed since is not known.
    """
    for directory in () if start is None else (start, *start.parents):
        git = directory / ".git"
        if git.is_dir() or git.is_file():
            found = _head(git)
            if found is not None:
                return found
            break
    for variable in _COMMIT_VARIABLES:
        said = environ.get(variable, "").strip().lower()
        if _COMMIT.fullmatch(said):
            return said
    return None


def _head(git: Path) -> str | None:
    if git.is_file():  # a further working tree, or a submodule
        kind, _, where = (_text(git) or "").partition(":")
        if kind != "gitdir":
            return None
        git = (git.parent / where.strip()).resolve()
    common = _text(git / "commondir")
    shared = git if common is None else (git / common).resolve()
    head = _text(git / "HEAD") or ""
    if not head.startswith("ref:"):
        return head if _COMMIT.fullmatch(head) else None
    ref = head.removeprefix("ref:").strip()
    if not ref.startswith("refs/") or ".." in ref:
        return None
    for place in (git, shared):
        found = _text(place / ref)
        if found is not None and _COMMIT.fullmatch(found):
            return found
    for line in (_text(shared / "packed-refs") or "").splitlines():
        name, _, packed = line.partition(" ")
        if packed == ref and _COMMIT.fullmatch(name):
            return name
    return None


# --- the GPU ------------------------------------------------------------------------------------


def gpu_id(local_rank: int, environ: Mapping[str, str], root: Path = _ROOT) -> str | None:
    """UUID of the NVIDIA device that this process will use, where that is beyond doubt now.

    That is: ``CUDA_VISIBLE_DEVICES`` names one by its UUID; there is one device to see; or the
    launcher gave a local rank and all devices are of one model, which CUDA then numbers by their
    place on the bus. Anything else is known when the device is in use.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    chosen = None if visible is None else [one.strip() for one in visible.split(",")]
    if chosen is not None and chosen and all(_GPU_UUID.match(one) for one in chosen):
        return _one_of(chosen, local_rank, environ, same=True)
    devices = _nvidia_devices(root)
    uuids = [uuid for _, uuid in devices]
    same = len({model for model, _ in devices}) == 1
    if chosen is not None:
        if not same and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            return None
        try:
            uuids = [uuids[int(one)] for one in chosen if int(one) >= 0]
        except (ValueError, IndexError):
            return None
        same = True
    return _one_of(uuids, local_rank, environ, same=same)


def _one_of(
    uuids: list[str], local_rank: int, environ: Mapping[str, str], *, same: bool
) -> str | None:
    if len(uuids) == 1:
        return uuids[0]
    launched = environ.get("LOCAL_RANK") or environ.get("SLURM_LOCALID")
    return uuids[local_rank] if launched and same and local_rank < len(uuids) else None


def _nvidia_devices(root: Path) -> list[tuple[str, str]]:
    """Model and UUID of each device of the driver, by place on the bus."""
    found = []
    folder = root / "proc/driver/nvidia/gpus"
    for place in sorted(folder.iterdir()) if folder.is_dir() else ():
        fields = {
            key.strip(): value.strip()
            for key, _, value in (
                line.partition(":") for line in (_text(place / "information") or "").splitlines()
            )
        }
        uuid = fields.get("GPU UUID", "")
        if _GPU_UUID.match(uuid) and "?" not in uuid:
            found.append((fields.get("Model", ""), uuid))
    return found


def _text(path: Path) -> str | None:
    """A small file's text; None where there is none."""
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace").strip()
    except OSError:
        return None
