# Types of the compiled statistics; weights/reductions_kernel.py says what they do.
from collections.abc import Sequence

from typing_extensions import Buffer

def reduce(
    items: Sequence[tuple[int | Buffer, int, int, bytes | None]], threads: int, histogram: bool, /
) -> list[tuple[int, int, int, int, float, float, float, float, float, tuple[int, ...] | None]]: ...
def use_loops(name: str, /) -> bool: ...
