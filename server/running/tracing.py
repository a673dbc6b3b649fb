"""Spans of answers, for OpenTelemetry (`polarlm[tracing]`), where OTEL_EXPORTER_OTLP_ENDPOINT says who collects them.

A request's span is `llm_request`, as of vLLM, with the attributes of OpenTelemetry's conventions for generative models;
inside it, each answer has `queue`, `prompt` and `steps`. Without the extra nothing of it is imported.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from polarlm.engine.outputs import Usage

HEADERS = ("traceparent", "tracestate")  # of W3C's Trace Context
_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_STATE = re.compile(r"[\t -~]{1,512}")  # a state that is passed on: the standard asks for 512 characters
_LAST_SECONDS = 2.0  # for the spans that are left when the server ends
_LOG = logging.getLogger(__name__)
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def trace_headers(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Those of HEADERS that a request has; none if traceparent is missing, malformed or there twice, as the standard
    says, and no tracestate of other characters than printable ASCII or of more than 512. headers: of an ASGI scope."""
    pairs = [*headers]
    sent = {
        name: b",".join(value for key, value in pairs if key == name.encode()).decode("latin-1") for name in HEADERS
    }
    is_valid = _PARENT.fullmatch(sent["traceparent"]) is not None
    return {name: value for name, value in sent.items() if is_valid and _STATE.fullmatch(value)}


def tracer() -> Any | None:
    """What makes spans; None if nobody collects them. The variables OTEL_* configure it."""
    provider = _provider()
    return None if provider is None else provider.get_tracer("polarlm")


def close() -> None:
    """Send the spans that are left, if their collector takes them soon. A later `tracer` begins anew."""
    if (provider := _provider()) is not None:
        thread = threading.Thread(target=provider.shutdown, daemon=True)  # it may wait for half a minute
        thread.start()
        thread.join(_LAST_SECONDS)
    _provider.cache_clear()


@cache
def _provider() -> Any | None:
    if not any(map(os.environ.get, _ENDPOINTS)):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        _LOG.warning("%s is set, but no spans are sent: install polarlm[tracing]", " or ".join(_ENDPOINTS))
        return None
    if os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf") != "http/protobuf":
        _LOG.warning("OTEL_EXPORTER_OTLP_PROTOCOL has no effect: spans are sent as http/protobuf, usually to port 4318")
    resource = Resource.create({"service.name": "polarlm"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class RequestSpan:
    """The span of a request, which begins now, inside of the one that its headers name. headers: of its response."""

    def __init__(self, tracer: Any, headers: Mapping[str, str], model: str, *, is_chat: bool) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(headers)
        self._tracer, self._span = tracer, tracer.start_span("llm_request", parent, SpanKind.SERVER)
        self._set("operation.name", "chat" if is_chat else "text_completion")
        self._set("provider.name", "polarlm")
        self._set("request.model", model)
        self._context, self.headers = set_span_in_context(self._span, parent), dict[str, str]()
        TraceContextTextMapPropagator().inject(self.headers, self._context)
        self._reasons: list[str] = []

    def _set(self, name: str, value: Any) -> None:
        self._span.set_attribute(f"gen_ai.{name}", value)

    def add_answer(self, queued: float, first: float | None, usage: Usage, reason: str) -> None:
        """Add the spans of an answer that has ended. queued, first: when it was queued and its first token came, of
        `time.monotonic`."""
        end, since_epoch = time.monotonic(), time.time_ns() - time.monotonic_ns()
        first = first or end
        times = [queued, min(queued + usage.queue_seconds, first), first, end]
        ns = [since_epoch + round(at * 1e9) for at in times]
        for name, start, stop in zip(("queue", "prompt", "steps"), ns, ns[1:], strict=False):
            self._tracer.start_span(name, self._context, start_time=start).end(stop)
        self._reasons.append(reason)

    def end(self, prompt_tokens: int, completion_tokens: int, outcome: str | None) -> None:
        """outcome: of the request, an error unless it is the reason why an answer ended."""
        self._set("usage.input_tokens", prompt_tokens)
        self._set("usage.output_tokens", completion_tokens)
        self._set("response.finish_reasons", self._reasons)
        if outcome is not None and outcome not in self._reasons:
            from opentelemetry.trace import StatusCode

            self._span.set_status(StatusCode.ERROR, outcome)
            self._span.set_attribute("error.type", outcome)
        self._span.end()
