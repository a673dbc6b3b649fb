"""/metrics: counters of the server and its load, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from engine.outputs import Status
from server.counters import Totals


class _Numbers(Collector):
    def __init__(self, done: Totals, now: Status, without_cached: bool) -> None:
        self._done, self._now = done, now
        self._left_out = {"cached_tokens"} if without_cached else set()

    def collect(self) -> Iterator[Metric]:
        done, now = self._done, self._now
        requests = CounterMetricFamily("polarlm_requests", "Requests that have ended, by how", labels=["outcome"])
        for outcome, count in sorted(done.requests.items()):
            requests.add_metric([outcome], count)
        yield requests
        for name, meaning, total in (
            ("prompt_tokens", "Tokens of prompts", done.prompt_tokens),
            ("cached_tokens", "Tokens of prompts that were in the cache already", done.cached_tokens),
            ("completion_tokens", "Tokens generated", done.completion_tokens),
            ("prefill_seconds", "Time spent on computing prompts", done.prefill_seconds),
            ("generation_seconds", "Time spent on computing answers, summed over requests", done.generation_seconds),
            ("request_seconds", "Time from arrival to the end, summed over requests", done.seconds),
        ):
            if name not in self._left_out:
                yield CounterMetricFamily(f"polarlm_{name}", meaning, value=total)
        for name, meaning, value in (
            ("requests_active", "Requests under way: waiting, computed, or being sent", done.active),
            ("requests_running", "Requests that take part in steps", now.running),
            ("requests_waiting", "Requests in the engine that do not take part in steps yet", now.waiting),
            ("kv_blocks", "Coded blocks of the KV store, in all groups of layers", now.blocks),
            ("kv_blocks_used", "Coded blocks that requests hold", now.blocks_used),
            ("kv_blocks_kept", "Coded blocks that no request holds, kept for a next turn to find", now.blocks_kept),
            ("kv_blocks_free", "Coded blocks with nothing in them that a next turn could find", now.blocks_free),
        ):
            yield GaugeMetricFamily(f"polarlm_{name}", meaning, value=value)


def exposition(done: Totals, now: Status, *, without_cached: bool) -> bytes:
    """The page that Prometheus reads; its type is prometheus_client.CONTENT_TYPE_LATEST.

    without_cached: whether to leave out the number of tokens that were found in the cache.
    """
    registry = CollectorRegistry()
    registry.register(_Numbers(done, now, without_cached))
    return generate_latest(registry)
