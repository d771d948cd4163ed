"""The two kinds of tensors in a snapshot, as its files are named, and how gradients are called."""

from __future__ import annotations

WEIGHTS, GRADIENTS = "weights", "gradients"
#: Ends the name of a gradient's row, and its key in the file.
GRADIENT_SUFFIX = ".grad"
