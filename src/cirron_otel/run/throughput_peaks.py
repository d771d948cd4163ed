"""What a device can do at most, and what a model does for a token, where either is known.

Peaks are the makers' figures for dense matrix products in bfloat16 (float16 where a device has no
bfloat16), in operations per second. Nothing is imported or started to find out: a device is asked
for its name only when the program has used it already.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from cirron_otel.watching import watched

#: By a part of the device's name, the longest first where one is a part of another.
PEAKS: Final = (
    ("B200", 2.25e15),
    ("GH200", 9.895e14),
    ("H200", 9.895e14),
    ("H100 PCIe", 7.56e14),
    ("H100 NVL", 8.35e14),
    ("H100", 9.895e14),
    ("H800", 9.895e14),
    ("A100", 3.12e14),
    ("A800", 3.12e14),
    ("A10G", 7.0e13),
    ("A10", 1.25e14),
    ("A30", 1.65e14),
    ("A40", 1.497e14),
    ("L40S", 3.62e14),
    ("L40", 1.81e14),
    ("L4", 1.21e14),
    ("V100", 1.25e14),
    ("T4", 6.5e13),
    ("MI300X", 1.3074e15),
    ("MI325X", 1.3074e15),
    ("MI250X", 3.83e14),
    ("RTX 4090", 1.652e14),
    ("RTX 3090", 7.1e13),
    ("RTX A6000", 1.548e14),
)
#: A forward takes two operations for each weight and token, a backward twice as many (Kaplan et
#: al., Scaling Laws for Neural Language Models, 2.1); attention's own are left out.
FLOPS_PER_WEIGHT: Final = 6


def peak_of(name: str) -> float | None:
    """The peak of a device of this name, FLOP/s; None where it is not known."""
    words = name.replace("-", " ").split()
    for part, peak in PEAKS:
        wanted = part.split()
        if any(words[i : i + len(wanted)] == wanted for i in range(len(words))):
            return peak
    return None


def peak_of_device() -> float | None:
    """The peak of the accelerator this process uses, where it does."""
    torch: Any = sys.modules.get("torch")
    try:
        if torch is None or not torch.cuda.is_initialized():
            return None
        return peak_of(torch.cuda.get_device_name())
    except Exception:  # noqa: BLE001 - whatever a driver says
        return None


def flops_of_models() -> float | None:
    """Operations for a token of the only watched model, where it is of a known kind.

    Known is what counts its own weights as ``transformers`` models do, all of them trained.
    """
    models = [model for model in watched.models if hasattr(model, "num_parameters")]
    if len(models) != 1:
        return None
    model: Any = models[0]
    try:
        if any(not parameter.requires_grad for parameter in model.parameters()):
            return None  # what is frozen takes less, how much less depends on where it is
        return float(FLOPS_PER_WEIGHT * model.num_parameters(exclude_embeddings=True))
    except Exception:  # noqa: BLE001 - a model of the program's
        return None
