# Types of the compiled verification; training_record/compiled.py says when it is used.
from collections.abc import Callable, Container, Mapping
from typing import Any

def encode(body: object, /) -> str | None: ...
def diary_line(prev: str, body: object, /) -> tuple[str, bytes] | None: ...
def hash_hex(text: bytes, /) -> str | None: ...
def use_sha(wanted: int, /) -> None: ...

class Reader:
    def values(self, block: bytes, /) -> list[dict[str, Any] | None]: ...

class Walk:
    count: int
    last_step: int
    last_time: float
    with_rows: bool
    row_step: int
    rows: int
    expected: Any
    stops: Container[int] | None
    chained: str
    digest: str
    @property
    def matched(self) -> int: ...
    @property
    def last_start(self) -> int: ...
    def __init__(
        self,
        sha256: Callable[..., Any],
        forms: tuple[tuple[str, tuple[tuple[str, tuple[str, ...]], ...], bool], ...],
        severities: tuple[str, tuple[str, ...]],
        /,
    ) -> None: ...
    def follow(self, block: bytes, start: int, /) -> int: ...
    def line(self, raw: bytes, /) -> tuple[dict[str, Any], bytes] | None: ...
    def seen(self) -> dict[str, int]: ...

class Layers:
    def __init__(
        self,
        expected: type[tuple[Any, ...]],
        sigma: float,
        warmup: int,
        floor: float,
        min_decades: float,
        confirmations: int,
        near_size: float,
        /,
    ) -> None: ...
    def check(self, step: int, grad: Mapping[str, float], found: list[Any], /) -> None: ...
    def near(self, layer: str, /) -> bool: ...
