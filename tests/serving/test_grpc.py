"""Services over gRPC, with OpenTelemetry's instrumentation and without, threaded and asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from opentelemetry.instrumentation.grpc import aio_server_interceptor, server_interceptor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import cirron_otel as ci
from cirron_otel.batch import SpanRecord
from helpers import Rows, RunProgram, read_spool, tree_text

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
METADATA = (("traceparent", CALLER), ("x-request-id", "mine"))
TREE = "cirron.session\n  request\n    work\n  request\n    decode\n    decode"


def of_call(_request: bytes, context: Any) -> Any:
    """The headers of a call, as both kinds of server have them."""
    return context.invocation_metadata()


def work() -> None:
    """What is inside of a request."""
    with ci.scope("work"):
        pass


@ci.inference(model="m", operation="chat", headers=of_call)
def unary(request: bytes, _context: Any) -> bytes:
    """One answer."""
    work()
    return request.upper()


@ci.inference(headers=of_call)
def stream(_request: bytes, _context: Any) -> Iterator[bytes]:
    """An answer in parts."""
    for part in (b"a", b"b"):
        with ci.scope("decode"):
            pass
        yield part


@ci.inference(model="m", operation="chat", headers=of_call)
async def aunary(request: bytes, _context: Any) -> bytes:
    """One answer, async."""
    work()
    return request.upper()


@ci.inference(headers=of_call)
async def astream(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
    """An answer in parts, async."""
    for part in (b"a", b"b"):
        await asyncio.sleep(0)
        with ci.scope("decode"):
            pass
        yield part


def handlers(one: Any, several: Any) -> Any:
    """The service's methods."""
    return grpc.method_handlers_generic_handler("Service", {
        "One": grpc.unary_unary_rpc_method_handler(one),
        "Several": grpc.unary_stream_rpc_method_handler(several),
    })  # fmt: skip


def ask(port: int) -> None:
    """Ask for an answer, and for one in parts."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        one = channel.unary_unary("/Service/One")
        several = channel.unary_stream("/Service/Several")
        assert one(b"x", metadata=METADATA, timeout=20) == b"X"
        assert list(several(b"x", metadata=METADATA, timeout=20)) == [b"a", b"b"]


def threaded(interceptors: list[Any]) -> None:
    """A server with a pool of threads."""
    server = grpc.server(futures.ThreadPoolExecutor(2), interceptors=interceptors)
    server.add_generic_rpc_handlers((handlers(unary, stream),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    ask(port)
    server.stop(None).wait()


def on_a_loop(interceptors: list[Any]) -> None:
    """A server on an event loop."""

    async def serve() -> None:
        server = grpc.aio.server(interceptors=interceptors)
        server.add_generic_rpc_handlers((handlers(aunary, astream),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        await asyncio.to_thread(ask, port)
        await server.stop(None)

    asyncio.run(serve())


SERVERS = [(threaded, server_interceptor), (on_a_loop, aio_server_interceptor)]


def recorded() -> Rows:
    """What was recorded, all of it."""
    assert ci.shutdown()
    return read_spool()


def parent_of(row: SpanRecord) -> str:
    """The id of a request's OTel parent; each is in the caller's trace."""
    assert row.otel
    assert row.otel.trace_id == CALLER[3:19]
    assert row.id[16:] == CALLER[19:35]
    assert row.attrs["request_id"] == "mine"
    return str(row.otel.parent_span_id)


@pytest.mark.parametrize(("serve", "make_interceptor"), SERVERS)
def test_a_request_is_the_child_of_the_servers_span(serve: Any, make_interceptor: Any) -> None:
    """With the instrumentation each request stands right under its call's span."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    ci.profile(frameworks=[])
    serve([make_interceptor(tracer_provider=provider)])
    provider.shutdown()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    rows = recorded()
    assert tree_text(rows) == TREE
    one, several = rows.named("request")
    for row, name in ((one, "/Service/One"), (several, "/Service/Several")):
        assert parent_of(row) == f"{spans[name].context.span_id:016x}"
        assert f"{spans[name].parent.span_id:016x}" == CALLER[36:52]
        assert row.otel
        assert row.otel.kind != "server"
    assert several.attrs["cirron.stream.end"] == "complete"


@pytest.mark.parametrize("serve", [threaded, on_a_loop])
def test_without_it_a_request_is_the_callers(serve: Any) -> None:
    """`headers=` reads the metadata: trace and id are the caller's."""
    ci.profile(frameworks=[])
    serve([])
    rows = recorded()
    assert tree_text(rows) == TREE
    for row in rows.named("request"):
        assert parent_of(row) == CALLER[36:52]
        assert row.otel
        assert row.otel.kind == "server"


def test_a_caller_without_a_trace_does_not_join_the_session(run_program: RunProgram) -> None:
    """Also of a server on the loop of the thread that began the recording."""
    run = run_program(
        """
        import asyncio, grpc
        import cirron_otel as ci
        ci.profile(frameworks=[])
        from opentelemetry.instrumentation.grpc import GrpcAioInstrumentorServer
        from opentelemetry.sdk.trace import TracerProvider
        provider = TracerProvider()
        GrpcAioInstrumentorServer().instrument(tracer_provider=provider)
        @ci.inference
        async def one(request, context):
            return request
        async def main():
            server = grpc.aio.server()
            handler = grpc.unary_unary_rpc_method_handler(one)
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler("S", {"One": handler}),))
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            def ask():
                with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                    channel.unary_unary("/S/One")(b"x", timeout=20)
            await asyncio.to_thread(ask)
            await server.stop(None)
        asyncio.run(main())
        GrpcAioInstrumentorServer().uninstrument()
        ci.shutdown()
        """
    )
    request, session = run.one("request"), run.one("cirron.session")
    assert request.parent_id == session.id
    assert request.id[16:] != session.id[16:]
