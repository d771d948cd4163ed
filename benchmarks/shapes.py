"""The shapes of well-known models' parameters, for whoever measures without the models."""

from __future__ import annotations

Shapes = list[tuple[int, ...]]


def resnet50() -> Shapes:
    """ResNet-50: 25.6 million in 161 tensors."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    inside = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        outside = 4 * width
        for block in range(blocks):
            shapes += [(width, inside, 1, 1), (width, width, 3, 3), (outside, width, 1, 1)]
            shapes += [(size,) for size in (width, width, outside) for _ in range(2)]
            if block == 0:
                shapes += [(outside, inside, 1, 1), (outside,), (outside,)]
            inside = outside
    return [*shapes, (1000, 2048), (1000,)]


def bert() -> Shapes:
    """BERT base: 109 million in 199 tensors."""
    size, wide = 768, 3072
    shapes: Shapes = [(30522, size), (512, size), (2, size), (size,), (size,)]
    for _ in range(12):
        for _ in range(4):
            shapes += [(size, size), (size,)]
        shapes += [(size,), (size,), (wide, size), (wide,), (size, wide), (size,), (size,), (size,)]
    return [*shapes, (size, size), (size,)]


def giga() -> Shapes:
    """A language model of a thousand million, in 174 tensors."""
    return [(50257, 2048), *[(2048, 4096), (4096, 2048), (2048, 2048), (2048,)] * 43, (2048,)]
