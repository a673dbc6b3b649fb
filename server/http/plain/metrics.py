"""/metrics: counters, times and the load of the server, in Prometheus' text format. docs/server.md lists them all.
Besides our own names, there are names of vLLM: queued and running requests, the used part of the KV store, and the size
of its blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

from prometheus_client import Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.responses import Response

from polarlm.engine import Engine
from polarlm.engine.cli.flags import release
from polarlm.engine.outputs import CompilationCounts, ExpertStatus, SnapshotStatus, Status, TierStatus
from polarlm.engine.state.cache_types import type_pair
from polarlm.server.running.counters import Totals

# The text format that all scrapers read, also those that ask for OpenMetrics first. prometheus_client's OpenMetrics has
# vllm_ where the names have vllm:, and the number of its own type, 1.0.0, is that of OpenMetrics, too.
_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Family = CounterMetricFamily | GaugeMetricFamily


class _Page(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> list[Metric]:
        return self._metrics


def page(*metrics: Iterable[Metric]) -> Response:
    """The page that Prometheus reads."""
    return Response(generate_latest(_Page(chain(*metrics))), headers={"Content-Type": _TYPE})


def exposition(engine: Engine, totals: Totals, status: Status, *, without_cached: bool) -> Response:
    """The page of one model. without_cached: whether the number of tokens that were cached is left out."""
    return page(
        _totals(totals, without_cached),
        _load(totals, status),
        _times(totals),
        _tiers(status.tiers),
        _experts(status.experts or ExpertStatus(0, 0, 0, 0)),
        _build(engine, status),
        _constraints(engine.grammars.counts()),
        _vllm_metrics(engine, status),
    )


def merge_models(pages: Mapping[str, str]) -> Iterable[Metric]:
    """The metrics of several models, by name, each family once; samples have the label `model`."""
    families: dict[str, Metric] = {}
    for model, text in pages.items():
        for family in text_string_to_metric_families(text):
            samples = families.setdefault(family.name, Metric(family.name, family.documentation, family.type)).samples
            samples += [one._replace(labels=one.labels | {"model": model}) for one in family.samples]
    return families.values()


def _totals(totals: Totals, without_cached: bool) -> Iterator[Metric]:
    outcomes = dict(sorted(totals.requests.items()))
    yield counters("polarlm_requests", "Requests that have ended, by outcome", "outcome", outcomes)
    for name, meaning, total in (
        ("prompt_tokens", "Tokens of prompts", totals.prompt_tokens),
        ("cached_tokens", "Tokens of prompts that were in the cache already", totals.cached_tokens),
        ("completion_tokens", "Tokens generated", totals.completion_tokens),
        ("drafted_tokens", "Tokens drafted and verified", totals.drafted_tokens),
        ("accepted_tokens", "Drafted tokens that are part of answers", totals.accepted_tokens),
        ("prefill_seconds", "Time spent on computing prompts", totals.prefill_seconds),
        ("generation_seconds", "Time spent on computing answers, summed over requests", totals.generation_seconds),
        ("request_seconds", "Time from arrival to the end, summed over requests", totals.seconds),
    ):
        if name != "cached_tokens" or not without_cached:
            yield CounterMetricFamily(f"polarlm_{name}", meaning, value=total)
    meaning = "Requests that have ended, by the name of the key that the client sent"
    yield counters("polarlm_key_requests", meaning, "key", totals.key_requests)
    yield counters(
        "polarlm_key_completion_tokens", "Tokens generated, by the name of the key", "key", totals.key_tokens
    )
    if not without_cached:
        meaning = "Cached tokens by the place that they came from"
        yield counters("polarlm_cached_tokens_from", meaning, "place", dict(sorted(totals.cached_from.items())))


def _load(totals: Totals, status: Status) -> Iterator[Metric]:
    state = status.snapshots or SnapshotStatus(0, 0, 0, 0)
    for name, meaning, value in (
        ("requests_active", "Requests under way: waiting, computed, or being sent", totals.active),
        ("requests_running", "Requests that take part in steps", status.running),
        ("requests_waiting", "Requests in the engine that do not take part in steps yet", status.waiting),
        ("kv_blocks", "Coded blocks of the KV store, in all groups of layers but recurrent ones", status.blocks),
        ("kv_blocks_used", "Coded blocks that requests hold", status.blocks_used),
        ("kv_blocks_kept", "Coded blocks that no request holds, kept for a next turn to find", status.blocks_kept),
        ("kv_blocks_free", "Coded blocks with nothing in them that a next turn could find", status.blocks_free),
        ("snapshots", "Snapshots of recurrent layers that there is room for", state.snapshots),
        ("snapshots_used", "Snapshots that requests hold", state.used),
        ("snapshots_kept", "Snapshots that no request holds, kept for a next turn to find", state.kept),
        ("snapshot_bytes", "Bytes of the computer's memory that there are for snapshots", state.bytes),
    ):
        yield GaugeMetricFamily(f"polarlm_{name}", meaning, value=value)


def _times(totals: Totals) -> Iterator[Metric]:
    for name, meaning, times in (
        ("time_to_first_token", "Time from a request's arrival to its first token", totals.first_token),
        ("inter_token_latency", "Time from a token of an answer to the next one", totals.gaps),
        ("request_latency", "Time from a request's arrival to the end of its answer", totals.latency),
    ):
        yield HistogramMetricFamily(f"polarlm_{name}_seconds", meaning, times.buckets(), times.seconds)


def _tiers(tiers: Sequence[TierStatus]) -> Iterator[Metric]:
    sizes = {tier.place: tier.bytes for tier in tiers if tier.bytes is not None}
    yield gauges("polarlm_tier_bytes", "Bytes of kept blocks and answers", "place", sizes)
    objects = {tier.place: tier.objects for tier in tiers if tier.objects is not None}
    yield gauges("polarlm_tier_objects", "Kept blocks and answers", "place", objects)
    meaning = "Errors of reading and writing"
    errors = CounterMetricFamily("polarlm_tier_errors", meaning, labels=["place", "operation"])
    for tier in tiers:
        errors.add_metric([tier.place, "read"], tier.read_errors)
        errors.add_metric([tier.place, "write"], tier.write_errors)
    meaning = "Objects that were found damaged and not used"
    yield counters("polarlm_tier_damaged_objects", meaning, "place", {tier.place: tier.damaged for tier in tiers})
    meaning = "Requests computed without a place that took too long"
    yield counters("polarlm_tier_timeouts", meaning, "place", {tier.place: tier.timeouts for tier in tiers})
    yield errors


def _experts(experts: ExpertStatus) -> Iterator[Metric]:
    meaning = "Weights of chosen experts, by where they were, if some are read from the file"
    yield counters("polarlm_chosen_experts", meaning, "place", {"memory": experts.hits, "file": experts.misses})
    meaning = "Bytes of experts that were read from the file"
    yield CounterMetricFamily("polarlm_expert_bytes_read", meaning, value=experts.bytes)


def _build(engine: Engine, status: Status) -> Iterator[Metric]:
    type_k, type_v = type_pair(engine.config)
    labels = {"version": release(), "backend": status.backend, "model": engine.model.name}
    labels |= {"cache_type_k": type_k, "cache_type_v": type_v}
    yield InfoMetricFamily("polarlm_build", "This program and what it serves", value=labels)


def _constraints(counts: CompilationCounts) -> Iterator[Metric]:
    outcomes = {name: counts.outcomes[name] for name in ("compiled", "refused", "abandoned", "too_many")}
    yield counters("polarlm_constraints", "New constraints, by outcome", "outcome", outcomes)
    meaning = "New constraints that are compiled or wait for it"
    yield GaugeMetricFamily("polarlm_constraints_waiting", meaning, value=counts.waiting)
    meaning = "Time until a new constraint was compiled or refused, waiting included"
    yield HistogramMetricFamily("polarlm_constraints_seconds", meaning, counts.took.buckets(), counts.took.seconds)


def _vllm_metrics(engine: Engine, status: Status) -> Iterator[Metric]:
    running, used_part = status.running + status.prefilling, status.blocks_used / max(1, status.blocks)
    for name, meaning, value in (
        ("num_requests_waiting", "Requests in the queue", status.waiting - status.prefilling),
        ("num_requests_running", "Requests that are computed: in prefill or in steps", running),
        ("kv_cache_usage_perc", "Part of the coded blocks that requests hold, 0 to 1", used_part),
    ):
        yield gauges(f"vllm:{name}", meaning, "model_name", {engine.model.name: value})
    blocks = {"block_size": str(engine.cache_shape.block_size), "num_gpu_blocks": str(status.blocks_of_largest)}
    yield InfoMetricFamily("vllm:cache_config", "The KV store: tokens of a block, and blocks", value=blocks)


def _family(kind: type[Family], name: str, meaning: str, label: str, values: Mapping[str, float]) -> Metric:
    """A family with a sample for each of `values`, by the value of its label."""
    family = kind(name, meaning, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


counters, gauges = partial(_family, CounterMetricFamily), partial(_family, GaugeMetricFamily)
