"""No proxy and no certificates of the machine that runs the tests."""

from __future__ import annotations

import os

import pytest

_CERTIFICATES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR")


@pytest.fixture(autouse=True)
def _clean_network(_clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests go straight to the loopback, and what is trusted is what the test says."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name in _CERTIFICATES:
            monkeypatch.delenv(name)
