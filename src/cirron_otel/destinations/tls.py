"""How a connection is trusted. By itself, so that to read settings loads no HTTP client."""

from __future__ import annotations

import msgspec


class Tls(msgspec.Struct, frozen=True):
    """How to trust a server and be trusted; paths of PEM files, ``None`` for the system's."""

    ca: str | None = None
    client_certificate: str | None = None
    client_key: str | None = None
