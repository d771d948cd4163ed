"""Every OTEL_EXPORTER_OTLP_* variable, and profile(otlp=): what they mean, and what is an error."""

from __future__ import annotations

import logging
import ssl
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest

from cirron_otel.destinations.base import Accepted, Parcel, RetryAfter
from cirron_otel.destinations.otlp import OtlpDestination
from cirron_otel.destinations.otlp_settings import (
    MAX_REQUEST_BYTES,
    OtlpTarget,
    otlp_targets,
)
from cirron_otel.destinations.tls import Tls
from cirron_otel.errors import CirronDependencyError, ConfigurationError
from delivery.otlp_server import grpc_receiver, http_receiver
from helpers import RunProgram
from spool_by_hand import training

BASE = "OTEL_EXPORTER_OTLP_"


def from_environment(**variables: str) -> OtlpTarget:
    """The only target of these variables, given without their common prefix."""
    (target,) = otlp_targets(environ={BASE + name: text for name, text in variables.items()})
    return target


# --- endpoints ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({"ENDPOINT": "http://c:4318"}, "http://c:4318/v1/traces"),
        ({"ENDPOINT": "http://c:4318/"}, "http://c:4318/v1/traces"),
        ({"ENDPOINT": "https://c/otlp/"}, "https://c/otlp/v1/traces"),
        ({"ENDPOINT": "http://c:4318/v1/traces"}, "http://c:4318/v1/traces"),
        ({"TRACES_ENDPOINT": "http://c:4318/custom"}, "http://c:4318/custom"),
        ({"TRACES_ENDPOINT": "http://c:4318"}, "http://c:4318/"),
        ({"TRACES_ENDPOINT": "http://a/t", "ENDPOINT": "http://b"}, "http://a/t"),
        ({"ENDPOINT": " http://c?x=1 "}, "http://c/v1/traces?x=1"),
        ({"ENDPOINT": "http://c:4317", "PROTOCOL": "grpc"}, "http://c:4317"),
        ({"ENDPOINT": "https://c", "PROTOCOL": "grpc"}, "https://c:443"),
        ({"ENDPOINT": "c:4317", "PROTOCOL": "grpc"}, "https://c:4317"),
        ({"ENDPOINT": "c:4317", "PROTOCOL": "grpc", "INSECURE": "true"}, "http://c:4317"),
        ({"ENDPOINT": "c:1", "PROTOCOL": "grpc", "INSECURE": "true", "TRACES_INSECURE": "false"},
         "https://c:1"),
        ({"ENDPOINT": "http://[::1]:4318"}, "http://[::1]:4318/v1/traces"),
    ],
)  # fmt: skip
def test_endpoint_variables(variables: dict[str, str], url: str) -> None:
    """The general endpoint is a base, the signal's own is used as it is, and wins."""
    assert from_environment(**variables).url == url


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/v1/traces", "http://c:4318/v1/traces"),
        ("https://c/api/public/otel", "https://c/api/public/otel/v1/traces"),
        ({"traces_endpoint": "https://c/ingest"}, "https://c/ingest"),
        ("grpc://c", "http://c:4317"),
        ("grpcs://c:5", "https://c:5"),
        ({"endpoint": "c:5", "protocol": "grpc", "insecure": True}, "http://c:5"),
    ],
)
def test_endpoint_argument(given: Any, url: str) -> None:
    """``profile(otlp=)`` takes a base or a full URL, and chooses gRPC by the scheme."""
    assert [target.url for target in otlp_targets(given, environ={})] == [url]


@pytest.mark.parametrize(
    "given",
    ["", "collector:4318", "ftp://c", "http://", "http://c:port", 5, {"endpoint": ""}, {"url": "x"},
     {"endpoint": "http://c", "timeout": 0}, {"endpoint": "http://c", "compression": "zstd"},
     {"endpoint": "http://c", "protocol": "udp"}, {"endpoint": "http://c", "name": "A B"},
     {"endpoint": "http://c", "max_request_bytes": 5}, {"endpoint": "http://c", "headers": 5},
     {"endpoint": "http://c", "certificate": 5}],
)  # fmt: skip
def test_a_wrong_argument_is_a_clear_error(given: Any) -> None:
    """What cannot be used is named, with what would be right."""
    with pytest.raises(ConfigurationError, match=r"profile\(otlp=\)") as caught:
        otlp_targets([given], environ={})
    assert "must be" in str(caught.value) or "known are" in str(caught.value) or (
        "takes" in str(caught.value)
    )  # fmt: skip


@pytest.mark.parametrize(
    "variables",
    [{"ENDPOINT": "nowhere"}, {"PROTOCOL": "carrier-pigeon"}, {"TIMEOUT": "soon"},
     {"COMPRESSION": "rar"}, {"HEADERS": "no equals sign"}, {"HEADERS": "bad name=x"},
     {"HEADERS": "k=a%0Aforged: 1"}, {"TRACES_TIMEOUT": "-1"}],
)  # fmt: skip
def test_a_wrong_variable_is_a_clear_error(variables: dict[str, str]) -> None:
    """A variable that cannot be used is named in the error."""
    (name,) = variables
    with pytest.raises(ConfigurationError, match=BASE + name):
        from_environment(**{"ENDPOINT": "http://c", **variables})


def test_secrets_are_in_no_message() -> None:
    """Neither a password in a URL nor a header's value is ever shown."""
    for bad in ("gopher://me:hunter2@host", "http://me:hunter2@"):
        with pytest.raises(ConfigurationError) as caught:
            otlp_targets(bad, environ={})
        assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigurationError) as caught:
        otlp_targets("http://c", {"key": "hunter2\n"[:7] + "\x01"}, {})
    assert "hunter2" not in str(caught.value)
    (target,) = otlp_targets("http://me:hunter2@c", environ={})
    assert target.url == "http://c/v1/traces"
    assert target.headers == {"authorization": "Basic bWU6aHVudGVyMg=="}
    assert "hunter2" not in OtlpDestination(target).description


# --- when at all ----------------------------------------------------------------------------------


def test_when_the_environment_asks() -> None:
    """An endpoint or the exporter's name is enough; none, another exporter, or disabled is not."""
    endpoint = {f"{BASE}ENDPOINT": "http://c:1"}
    assert otlp_targets(environ={}) == []
    assert len(otlp_targets(environ=endpoint)) == 1
    assert otlp_targets(environ={**endpoint, "OTEL_TRACES_EXPORTER": "none"}) == []
    assert otlp_targets(environ={**endpoint, "OTEL_TRACES_EXPORTER": "console"}) == []
    assert len(otlp_targets(environ={**endpoint, "OTEL_TRACES_EXPORTER": "cirron, otlp"})) == 1
    (default,) = otlp_targets(environ={"OTEL_TRACES_EXPORTER": "otlp"})
    assert default.url == "http://localhost:4318/v1/traces"
    assert otlp_targets(environ={**endpoint, "OTEL_SDK_DISABLED": "TRUE"}) == []
    assert otlp_targets("http://x", environ={"OTEL_SDK_DISABLED": "true"}) == []
    assert otlp_targets(environ={f"{BASE}ENDPOINT": "  "}) == []


def test_when_the_call_decides() -> None:
    """An argument adds to nothing and replaces nothing: it is what goes; False is none."""
    endpoint = {f"{BASE}ENDPOINT": "http://c:1"}
    assert otlp_targets(False, environ=endpoint) == []  # noqa: FBT003 - the argument's value
    assert [one.url for one in otlp_targets("http://x", environ=endpoint)] == ["http://x/v1/traces"]
    assert otlp_targets(environ=endpoint, joined=True) == []
    assert len(otlp_targets(True, environ=endpoint, joined=True)) == 1  # noqa: FBT003
    assert len(otlp_targets("http://x", environ={}, joined=True)) == 1


def test_several_receivers() -> None:
    """A list is several receivers, each once; two at one URL need names."""
    found = otlp_targets(
        ["http://a:4318", {"endpoint": "grpc://b", "timeout": 3}, "http://a:4318/v1/traces"],
        {"x-key": "1"},
        {},
    )
    assert [one.url for one in found] == ["http://a:4318/v1/traces", "http://b:4317"]
    assert [one.timeout for one in found] == [10.0, 3.0]
    assert all(one.headers == {"x-key": "1"} for one in found)
    tenants = [{"endpoint": "http://a", "headers": {"tenant": name}} for name in "ab"]
    with pytest.raises(ConfigurationError, match="'name' of its own"):
        otlp_targets(tenants, environ={})
    named = [{**one, "name": one["headers"]["tenant"]} for one in tenants]  # type: ignore[index]
    assert [one.cursor_name for one in otlp_targets(named, environ={})] == ["otlp-a", "otlp-b"]


def test_cursor_name_is_stable() -> None:
    """The name of a receiver's cursor depends on where it is, and on no secret or tuning."""
    one, two, other = (
        otlp_targets(given, headers, {})[0].cursor_name
        for given, headers in [
            ("http://c:4318", {"key": "1"}),
            ({"endpoint": "http://c:4318/v1/traces", "timeout": 1}, {"key": "2"}),
            ("http://d:4318", None),
        ]
    )
    assert one == two != other
    assert one.startswith("otlp-")
    assert len(one) == len("otlp-") + 8


# --- the other variables --------------------------------------------------------------------------


def test_everything_else_from_the_environment() -> None:
    """Protocol, headers, timeout, compression and certificates, each with its signal's form."""
    general = from_environment(
        ENDPOINT="https://c",
        PROTOCOL="http/json",
        HEADERS="Api-Key=a%20b%3D, x = 1,,y=2=3",
        TIMEOUT="2.5",
        COMPRESSION="gzip",
        CERTIFICATE="/ca.pem",
        CLIENT_CERTIFICATE="/crt.pem",
        CLIENT_KEY="/key.pem",
    )
    assert general == OtlpTarget(
        "https://c/v1/traces", "http/json", {"api-key": "a b=", "x": "1", "y": "2=3"}, 2.5, "gzip",
        Tls("/ca.pem", "/crt.pem", "/key.pem"),
    )  # fmt: skip
    assert general.max_request_bytes == MAX_REQUEST_BYTES
    own = from_environment(
        ENDPOINT="https://c",
        PROTOCOL="grpc", TRACES_PROTOCOL="http/json",
        HEADERS="a=1", TRACES_HEADERS="b=2",
        TIMEOUT="1", TRACES_TIMEOUT="3",
        COMPRESSION="gzip", TRACES_COMPRESSION="none",
        CERTIFICATE="/a", TRACES_CERTIFICATE="/b",
        CLIENT_KEY="/a", TRACES_CLIENT_KEY="/b",
        CLIENT_CERTIFICATE="/a", TRACES_CLIENT_CERTIFICATE="/b",
    )  # fmt: skip
    assert own == OtlpTarget(
        "https://c/v1/traces", "http/json", {"b": "2"}, 3.0, "none", Tls("/b", "/b", "/b")
    )


def test_a_timeout_in_milliseconds_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    """10000 is ten seconds, as the specification has it; 10 is ten seconds as Python reads it."""
    with caplog.at_level(logging.WARNING, "cirron_otel"):
        assert from_environment(ENDPOINT="http://c", TIMEOUT="10").timeout == 10.0
        assert caplog.text == ""
        assert from_environment(ENDPOINT="http://c", TIMEOUT="10000").timeout == 10.0
        assert "taken for milliseconds" in caplog.text


def test_headers_of_one_receiver_go_to_no_other() -> None:
    """Headers of the environment go to the environment's receiver, not to one that a call names."""
    environ = {f"{BASE}ENDPOINT": "https://ours:4318", f"{BASE}HEADERS": "key=secret"}
    assert otlp_targets(environ=environ)[0].headers == {"key": "secret"}
    assert otlp_targets("https://ours/other", environ=environ)[0].headers == {"key": "secret"}
    assert otlp_targets("https://theirs", environ=environ)[0].headers == {}
    del environ[f"{BASE}ENDPOINT"]
    assert otlp_targets("https://theirs", environ=environ)[0].headers == {"key": "secret"}


def test_without_the_protobuf_library(run_program: RunProgram) -> None:
    """Where opentelemetry-proto is missing JSON goes out; protobuf by name says what to install."""
    run = run_program(
        """
        import sys
        sys.modules["opentelemetry.proto"] = None
        from cirron_otel.destinations.otlp_settings import otlp_targets
        from cirron_otel.destinations.otlp import OtlpDestination
        (target,) = otlp_targets("http://127.0.0.1:9", environ={})
        print(target.protocol)
        OtlpDestination(target).close()
        for protocol in ("http/protobuf", "grpc"):
            try:
                otlp_targets({"endpoint": "http://127.0.0.1:9", "protocol": protocol}, environ={})
            except ImportError as error:
                print(error)
        """,
        measured=False,
    )
    chosen, protobuf, by_grpc = run.stdout.splitlines()
    assert chosen == "http/json"
    assert "cirron-otel[otlp]" in protobuf
    assert "cirron-otel[otlp-grpc]" in by_grpc
    assert issubclass(CirronDependencyError, ImportError)


# --- TLS over real sockets ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate authority, a server's certificate for 127.0.0.1, and a client's."""
    where = tmp_path_factory.mktemp("pems")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=where, check=True, capture_output=True)  # noqa: S607

    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.pem",
            "-days", "2", "-subj", "/CN=test-ca")  # fmt: skip
    (where / "san").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", "client"):
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-out",
                f"{name}.csr", "-subj", f"/CN={name}")  # fmt: skip
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
                "-CAcreateserial", "-days", "2", "-extfile", "san",
                "-out", f"{name}.pem")  # fmt: skip
    return where


def send_to(url: str, **variables: str) -> Any:
    """Send one batch to a receiver that is described by variables; its answer."""
    training(Path.cwd(), epochs=1, steps=1)
    target = from_environment(ENDPOINT=url, TIMEOUT="2", **variables)
    destination = OtlpDestination(target, pending=False)
    answer = destination.send(Parcel.read(min(Path("spool").glob("*.json"))))
    destination.close()
    return answer


def test_https_with_a_client_certificate(pems: Path) -> None:
    """A private authority is trusted by its file, and the server sees the client's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pems / "server.pem", pems / "server.key")
    context.load_verify_locations(pems / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    known = {"CERTIFICATE": str(pems / "ca.pem")}
    ours = {"CLIENT_CERTIFICATE": str(pems / "client.pem"), "CLIENT_KEY": str(pems / "client.key")}
    with http_receiver(context) as server:
        assert send_to(server.url, **known, **ours) == Accepted()
        assert len(server.spans) == 6
        refused = send_to(server.url, **ours)
        assert isinstance(refused, RetryAfter)
        assert "not trusted" in refused.reason
        assert isinstance(send_to(server.url, **known), RetryAfter)


def test_grpc_with_tls(pems: Path) -> None:
    """GRPC with TLS and a client certificate delivers; without the authority it does not."""
    credentials = grpc.ssl_server_credentials(
        [((pems / "server.key").read_bytes(), (pems / "server.pem").read_bytes())],
        root_certificates=(pems / "ca.pem").read_bytes(),
        require_client_auth=True,
    )
    ours = {"CLIENT_CERTIFICATE": str(pems / "client.pem"), "CLIENT_KEY": str(pems / "client.key"),
            "PROTOCOL": "grpc"}  # fmt: skip
    with grpc_receiver(credentials=credentials) as server:
        url = server.url.replace("grpcs://", "https://")
        assert send_to(url, CERTIFICATE=str(pems / "ca.pem"), **ours) == Accepted()
        assert len(server.spans) == 6
        assert isinstance(send_to(url, **ours), RetryAfter)


def test_a_certificate_that_is_not_there_is_an_error() -> None:
    """A file that cannot be read is named before anything is sent, for HTTP and for gRPC."""
    for protocol in ("http/protobuf", "grpc"):
        target = from_environment(
            ENDPOINT="https://127.0.0.1:9", PROTOCOL=protocol, CERTIFICATE="/no/such.pem"
        )
        with pytest.raises(ConfigurationError, match=r"/no/such\.pem"):
            OtlpDestination(target)
