"""Traces: a request continues the one that its headers name, and its spans say where its time went."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from polarlm.server.running import journal, tracing
from tests.server.http_server import Serving
from tests.server.lines import PATIENCE, eventually
from tests.server.test_batch import Moody, moody, says

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
STATE = "rojo=1,congo=t61"
BODY = {"prompt": "the rain", "temperature": 0, "max_tokens": 6, "ignore_eos": True}
WITHOUT = [  # malformed, as the standard has it
    *(
        "",
        "00",
        PARENT[:-1],
        PARENT.upper(),
        f"ff{PARENT[2:]}",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
    ),
]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Any]]:
    """The spans that have ended, oldest first, a request's last: that may be after its response has arrived."""
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), trace.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "tracer", lambda: provider.get_tracer("polarlm"))

    def ended() -> list[Any]:
        eventually(lambda: any(span.name == "llm_request" for span in exporter.get_finished_spans()))
        return [*exporter.get_finished_spans()]

    return ended


def root_of(spans: list[Any]) -> Any:
    (root,) = [span for span in spans if span.name == "llm_request"]
    return root


def test_a_request_continues_the_trace_of_its_headers(shared: Serving, spans: Callable[[], list[Any]]) -> None:
    headers = {"traceparent": PARENT, "tracestate": STATE}
    response = shared.http.post("/v1/completions", json=BODY, headers=headers)
    *children, root = spans()
    assert (f"{root.parent.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, SPAN)
    assert response.headers["traceparent"] == f"00-{TRACE}-{root.context.span_id:016x}-01"
    assert response.headers["tracestate"] == STATE
    assert [span.name for span in children] == ["queue", "prompt", "steps"]
    assert {span.parent.span_id for span in children} == {root.context.span_id}
    usage = response.json()["usage"]
    attributes = dict(root.attributes)
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "polarlm",
        "gen_ai.request.model": shared.engine.model.name,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 6,
    }
    assert root.kind.name == "SERVER"
    assert root.status.is_unset or root.status.is_ok


def test_spans_follow_each_other(shared: Serving, spans: Callable[[], list[Any]]) -> None:
    """A request that waits for another one is in the queue meanwhile."""
    shared.gate.close()
    opening = threading.Timer(0.3, shared.gate.open)
    opening.start()
    assert shared.post("/v1/completions", BODY).is_success
    queue, prompt, steps, root = spans()
    times = [queue.start_time, queue.end_time, prompt.start_time, prompt.end_time, steps.start_time, steps.end_time]
    assert times == sorted(times)
    assert abs(queue.end_time - prompt.start_time) < 1e6  # ns
    assert abs(prompt.end_time - steps.start_time) < 1e6
    assert root.start_time - 1e6 <= times[0]
    assert times[-1] <= root.end_time + 1e6
    assert queue.end_time - queue.start_time > 1e8


@pytest.mark.parametrize("stream", [False, True])
def test_each_answer_of_a_request_has_its_spans(
    shared: Serving, spans: Callable[[], list[Any]], *, stream: bool
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "n": 2, "max_tokens": 3, "ignore_eos": True, "stream": stream}
    response = shared.post("/v1/chat/completions", body)
    assert [span.name for span in spans()].count("steps") == 2
    root = root_of(spans())
    assert response.headers["traceparent"].startswith(f"00-{root.context.trace_id:032x}-{root.context.span_id:016x}-")
    assert root.parent is None
    assert root.attributes["gen_ai.operation.name"] == "chat"
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length", "length")
    assert root.attributes["gen_ai.usage.output_tokens"] == 6


def test_what_fails_says_why(shared: Serving, spans: Callable[[], list[Any]]) -> None:
    shared.refused("/v1/completions", {"prompt": "the rain " * 1000})
    (root,) = spans()
    assert (root.status.status_code.name, root.attributes["error.type"]) == ("ERROR", "error")


def test_what_computes_nothing_has_no_span(shared: Serving, spans: Callable[[], list[Any]]) -> None:
    for path in ("/health", "/metrics", "/v1/models"):
        assert shared.http.get(path, headers={"traceparent": PARENT}).headers["traceparent"] == PARENT
    shared.post("/v1/completions", BODY)
    assert len(spans()) == 4


@pytest.mark.parametrize("parent", [PARENT, *WITHOUT])
def test_without_a_collector_the_log_and_the_response_have_the_header(
    shared: Serving, parent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(journal.REQUESTS, "info", lambda _text, extra: lines.append(extra["line"]))
    response = shared.http.post("/v1/completions", json=BODY, headers={"traceparent": parent, "tracestate": STATE})
    found = (PARENT, STATE) if parent == PARENT else (None, None)
    assert (response.headers.get("traceparent"), response.headers.get("tracestate")) == found
    eventually(lambda: lines)  # the line is written after the response
    assert lines[0].get("traceparent") == found[0]
    json.dumps(lines)
    assert (f"trace {PARENT}" in journal._in_words(lines[0])) == (parent == PARENT)


def test_headers_that_are_there_twice(shared: Serving) -> None:
    """States are joined; of two parents none holds."""
    for parents, found in (([PARENT], (PARENT, "a=1,b=2")), ([PARENT, PARENT], (None, None))):
        sent = [*(("traceparent", one) for one in parents), ("tracestate", "a=1"), ("tracestate", "b=2")]
        headers = shared.http.get("/health", headers=sent).headers
        assert (headers.get("traceparent"), headers.get("tracestate")) == found


@pytest.mark.parametrize(("state", "is_kept"), [(b"a=1,\tb=2", True), (b"a=\xe9", False), (b"a=" + b"1" * 511, False)])
def test_a_state_that_others_may_not_take_is_dropped(shared: Serving, state: bytes, *, is_kept: bool) -> None:
    sent = [(b"traceparent", PARENT.encode()), (b"tracestate", state)]
    headers = shared.http.get("/health", headers=sent).headers
    assert (headers["traceparent"], headers.get("tracestate")) == (PARENT, state.decode() if is_kept else None)


def test_nothing_is_imported_without_a_collector() -> None:
    code = "import sys, polarlm.server.serving; print([name for name in sys.modules if 'opentelemetry' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


@pytest.fixture
def new_tracer() -> Iterator[Callable[[], Any]]:
    """`tracing.tracer` as a process calls it first."""
    tracing.close()

    def make() -> Any:
        tracing._provider.cache_clear()
        return tracing.tracer()

    yield make
    tracing.close()


def test_a_missing_extra_is_said(
    new_tracer: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert new_tracer() is None
    assert not caplog.text
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    assert new_tracer() is None
    assert "install polarlm[tracing]" in caplog.text


def test_a_collector_gets_spans(
    new_tracer: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Over OTLP, as the standard's variables say."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies: list[tuple[str, str | None, bytes]] = []

    def collect(handler: Moody) -> None:
        bodies.append((handler.path, handler.headers["x-team"], handler.body))
        says(200, b"")(handler)

    with moody(collect) as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=rain")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
        tracer = new_tracer()
        tracing.RequestSpan(tracer, {}, "tiny", is_chat=True).end(1, 2, None)
        assert tracer.span_processor.force_flush(10_000)
    ((path, team, body),) = bodies
    assert (path, team) == ("/v1/traces", "rain")
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    names = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert names["service.name"] == "ours"
    assert [span.name for one in resource.scope_spans for span in one.spans] == ["llm_request"]
    assert "OTEL_EXPORTER_OTLP_PROTOCOL has no effect" in caplog.text


def test_a_collector_that_does_not_answer_is_not_waited_for(
    new_tracer: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setattr(tracing, "_LAST_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.getsockname()[1]}")
        tracing.RequestSpan(new_tracer(), {}, "tiny", is_chat=True).end(1, 2, None)
        tracing.close()
        connection, _ = collector.accept()
        with connection:
            connection.settimeout(PATIENCE)
            assert b"POST /v1/traces" in connection.recv(1000)  # which still waits for its answer
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
