"""/metrics: counters, times and the load of the server, in Prometheus' text format. docs/server.md lists them all.

The page has our own names, and those of vLLM that routers read by default (the model server protocol of the Gateway
API's inference extension): queued and running requests, the used part of the KV store, and the size of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from polarlm.engine import Engine
from polarlm.engine.cli.flags import release
from polarlm.engine.outputs import CompilationCounts, ExpertStatus, SnapshotStatus, Status, TierStatus
from polarlm.engine.state.cache_types import stored
from polarlm.server.running.counters import Totals


class _Numbers(Collector):
    def __init__(self, done: Totals, now: Status, without_cached: bool) -> None:
        self._done, self._now = done, now
        self._left_out = {"cached_tokens"} if without_cached else set()

    def collect(self) -> Iterator[Metric]:
        done, now, state = self._done, self._now, self._now.snapshots or SnapshotStatus(0, 0, 0, 0)
        requests = CounterMetricFamily("polarlm_requests", "Requests that have ended, by outcome", labels=["outcome"])
        for outcome, count in sorted(done.requests.items()):
            requests.add_metric([outcome], count)
        yield requests
        for name, meaning, total in (
            ("prompt_tokens", "Tokens of prompts", done.prompt_tokens),
            ("cached_tokens", "Tokens of prompts that were in the cache already", done.cached_tokens),
            ("completion_tokens", "Tokens generated", done.completion_tokens),
            ("drafted_tokens", "Tokens drafted and verified", done.drafted_tokens),
            ("accepted_tokens", "Drafted tokens that are part of answers", done.accepted_tokens),
            ("prefill_seconds", "Time spent on computing prompts", done.prefill_seconds),
            ("generation_seconds", "Time spent on computing answers, summed over requests", done.generation_seconds),
            ("request_seconds", "Time from arrival to the end, summed over requests", done.seconds),
        ):
            if name not in self._left_out:
                yield CounterMetricFamily(f"polarlm_{name}", meaning, value=total)
        if "cached_tokens" not in self._left_out:
            places = CounterMetricFamily(
                "polarlm_cached_tokens_from", "Cached tokens by the place that they came from", labels=["place"]
            )
            for place, tokens in sorted(done.cached_from.items()):
                places.add_metric([place], tokens)
            yield places
        for name, meaning, value in (
            ("requests_active", "Requests under way: waiting, computed, or being sent", done.active),
            ("requests_running", "Requests that take part in steps", now.running),
            ("requests_waiting", "Requests in the engine that do not take part in steps yet", now.waiting),
            ("kv_blocks", "Coded blocks of the KV store, in all groups of layers but recurrent ones", now.blocks),
            ("kv_blocks_used", "Coded blocks that requests hold", now.blocks_used),
            ("kv_blocks_kept", "Coded blocks that no request holds, kept for a next turn to find", now.blocks_kept),
            ("kv_blocks_free", "Coded blocks with nothing in them that a next turn could find", now.blocks_free),
            ("snapshots", "Snapshots of recurrent layers that there is room for", state.snapshots),
            ("snapshots_used", "Snapshots that requests hold", state.used),
            ("snapshots_kept", "Snapshots that no request holds, kept for a next turn to find", state.kept),
            ("snapshot_bytes", "Bytes of the computer's memory that there are for snapshots", state.bytes),
        ):
            yield GaugeMetricFamily(f"polarlm_{name}", meaning, value=value)
        by_type = GaugeMetricFamily(
            "polarlm_kv_blocks_of_type",
            "Used and kept blocks by cache type, with --cache-type auto or by-age",
            labels=["type"],
        )
        for name, count in (now.types or {}).items():
            by_type.add_metric([name], count)
        yield by_type


class _Times(Collector):
    def __init__(self, done: Totals) -> None:
        self._done = done

    def collect(self) -> Iterator[Metric]:
        done = self._done
        for name, meaning, times in (
            ("time_to_first_token", "Time from a request's arrival to its first token", done.first_token),
            ("inter_token_latency", "Time from a token of an answer to the next one", done.gaps),
            ("request_latency", "Time from a request's arrival to the end of its answer", done.latency),
        ):
            yield HistogramMetricFamily(f"polarlm_{name}_seconds", meaning, times.buckets(), times.seconds)


class _Tiers(Collector):
    def __init__(self, tiers: Sequence[TierStatus]) -> None:
        self._tiers = tiers

    def collect(self) -> Iterator[Metric]:
        size = GaugeMetricFamily("polarlm_tier_bytes", "Bytes of kept blocks and answers", labels=["place"])
        objects = GaugeMetricFamily("polarlm_tier_objects", "Kept blocks and answers", labels=["place"])
        damaged = CounterMetricFamily(
            "polarlm_tier_damaged_objects", "Objects that were found damaged and not used", labels=["place"]
        )
        timeouts = CounterMetricFamily(
            "polarlm_tier_timeouts", "Requests computed without a place that took too long", labels=["place"]
        )
        errors = CounterMetricFamily(
            "polarlm_tier_errors", "Errors of reading and writing", labels=["place", "operation"]
        )
        for tier in self._tiers:
            if tier.bytes is not None and tier.objects is not None:
                size.add_metric([tier.place], tier.bytes)
                objects.add_metric([tier.place], tier.objects)
            damaged.add_metric([tier.place], tier.damaged)
            timeouts.add_metric([tier.place], tier.timeouts)
            errors.add_metric([tier.place, "read"], tier.read_errors)
            errors.add_metric([tier.place, "write"], tier.write_errors)
        yield from (size, objects, damaged, timeouts, errors)


class _Experts(Collector):
    def __init__(self, experts: ExpertStatus | None) -> None:
        self._experts = experts

    def collect(self) -> Iterator[Metric]:
        experts = self._experts or ExpertStatus(0, 0, 0, 0)
        meaning = "Weights of chosen experts, by where they were, if some are read from the file"
        chosen = CounterMetricFamily("polarlm_chosen_experts", meaning, labels=["place"])
        chosen.add_metric(["memory"], experts.hits)
        chosen.add_metric(["file"], experts.misses)
        yield chosen
        meaning = "Bytes of experts that were read from the file"
        yield CounterMetricFamily("polarlm_expert_bytes_read", meaning, value=experts.bytes)


class _Build(Collector):
    def __init__(self, engine: Engine, now: Status) -> None:
        self._engine, self._now = engine, now

    def collect(self) -> Iterator[Metric]:
        type_k, type_v = stored(self._engine.config)
        about = {"version": release(), "backend": self._now.backend, "model": self._engine.model.name}
        about |= {"cache_type_k": type_k, "cache_type_v": type_v}
        yield InfoMetricFamily("polarlm_build", "This program and what it serves", value=about)


class _Constraints(Collector):
    def __init__(self, counts: CompilationCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        counts = self._counts
        ended = CounterMetricFamily("polarlm_constraints", "New constraints, by outcome", labels=["outcome"])
        for outcome in ("compiled", "refused", "abandoned", "too_many"):
            ended.add_metric([outcome], counts.outcomes[outcome])
        yield ended
        meaning = "New constraints that are compiled or wait for it"
        yield GaugeMetricFamily("polarlm_constraints_waiting", meaning, value=counts.waiting)
        meaning = "Time until a new constraint was compiled or refused, waiting included"
        yield HistogramMetricFamily("polarlm_constraints_seconds", meaning, counts.took.buckets(), counts.took.seconds)


class _ForRouters(Collector):
    def __init__(self, engine: Engine, now: Status) -> None:
        self._engine, self._now = engine, now

    def collect(self) -> Iterator[Metric]:
        engine, now = self._engine, self._now
        for name, meaning, value in (
            ("num_requests_waiting", "Requests in the queue", now.waiting - now.prefilling),
            (
                "num_requests_running",
                "Requests that are computed: in prefill or in steps",
                now.running + now.prefilling,
            ),
            (
                "kv_cache_usage_perc",
                "Part of the coded blocks that requests hold, 0 to 1",
                now.blocks_used / max(1, now.blocks),
            ),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", meaning, labels=["model_name"])
            gauge.add_metric([engine.model.name], value)
            yield gauge
        blocks = {"block_size": str(engine.cache_shape.block_size), "num_gpu_blocks": str(now.blocks_of_largest)}
        yield InfoMetricFamily("vllm:cache_config", "The KV store: tokens of a block, and blocks", value=blocks)


def exposition(engine: Engine, done: Totals, now: Status, *, without_cached: bool) -> bytes:
    """The page that Prometheus reads, of type prometheus_client.CONTENT_TYPE_LATEST.

    without_cached: whether to leave out the number of tokens that were found in the cache.
    """
    registry = CollectorRegistry()
    registry.register(_Numbers(done, now, without_cached))
    registry.register(_Times(done))
    registry.register(_Tiers(now.tiers))
    registry.register(_Experts(now.experts))
    registry.register(_Build(engine, now))
    registry.register(_Constraints(engine.grammars.counts()))
    registry.register(_ForRouters(engine, now))
    return generate_latest(registry)
