"""`python -m polarlm.bench.serving.simulate`: how many machines a load needs, without the machines.

It answers two questions. How do hit rate and latencies depend on the number of machines and on routing, at the same
load per machine? And how many machines does a given load need so that 95 % of the requests get their first token in
time, for each routing, cache type and set of tiers?
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from polarlm.bench import report
from polarlm.bench.command import at_least
from polarlm.bench.report import Output
from polarlm.bench.serving.simulate import plot
from polarlm.bench.serving.simulate.beside import beside, format_beside
from polarlm.bench.serving.simulate.costs import Costs, read
from polarlm.bench.serving.simulate.events import MOST_EVENTS, Fleet, Result, Simulation
from polarlm.bench.serving.simulate.machine import Settings
from polarlm.bench.serving.simulate.routing import ROUTERS
from polarlm.bench.serving.simulate.tables import format_result
from polarlm.bench.serving.simulate.tiers import TierSize
from polarlm.bench.serving.simulate.trace import Trace, make
from polarlm.engine.cli.commands import command, note
from polarlm.engine.cli.flags import FlagError, parse
from polarlm.engine.config import setting
from polarlm.engine.state.plan import parse_size

# Bytes, bytes per second and seconds of latency: host memory over PCIe, one NVMe disk.
_TIERS = {"ram": (128 << 30, 25e9, 20e-6), "disk": (2 << 40, 5e9, 200e-6)}
_NETWORKS, _NETWORK_LATENCY = (10, 25, 100), 1e-3  # Gbit/s to a remote store
_MOST_REQUESTS = 400_000  # most requests to simulate per number of machines: larger fleets run for a shorter time
_MOST_MACHINES = 1024  # most machines to try for a load


@dataclass(frozen=True)
class Options:
    """The flags: the load, the machines and the costs of their work."""

    costs: str = setting(
        "",
        "--costs",
        metavar="FILE,FILE",
        help="results of bench.speed or bench.gpu.predict, one for each cache type; for --beside also of bench.serving",
    )
    machines: str = setting("1,10,100", "--machines", metavar="N,N", help="at the same load for each; up to 10000")
    rate: float = setting(2.0, "--rate", metavar="R", help="requests a second for each of them")
    load: float = setting(100.0, "--load", metavar="R", help="requests a second that machines are counted for")
    target: float = setting(1.0, "--target", metavar="S", help="seconds to the first token of 95 of 100 requests")
    seconds: float = setting(120.0, "--seconds", metavar="S", help="that are measured")
    warm: float = setting(120.0, "--warm", metavar="S", help="that come before them")
    agents: float = setting(0.5, "--agents", metavar="P", help="part of the requests that are agents'")
    context: int = setting(32768, "--context", metavar="N", help="tokens of a conversation at most")
    parallel: int = setting(64, "--parallel", metavar="N", help="requests that a machine computes at a time")
    store: str = setting("100G", "--store", metavar="SIZE", help="of a machine's KV store")
    beside: str | None = setting(
        None, "--beside", metavar="FILE", help="only compare a result of bench.serving with its simulation"
    )
    seed: int = setting(0, "--seed", metavar="N", help="of the load")


@command
def main(argv: Sequence[str]) -> None:
    """Simulates, writes JSON and a picture, prints the tables."""
    options, destination = parse(
        argv,
        {"Simulation": Options, "Output": Output},
        prog="python -m polarlm.bench.serving.simulate",
        description="How many machines a load needs, by simulation.",
        checks={
            **dict.fromkeys(("rate", "load", "target", "seconds"), _positive),
            **dict.fromkeys(("context", "parallel"), at_least(1)),
            **dict.fromkeys(("warm", "seed"), at_least(0)),
            "agents": lambda value: None if 0 <= value <= 1 else "must be from 0 to 1",
        },
    )
    files = options.costs.split(",") if options.costs else [str(_default_costs())]
    costs = [read(Path(file)) for file in files]
    if options.beside is not None:
        _compare(options, costs[0], destination, argv)
        return
    counts = _numbers("--machines", options.machines)
    output = destination.path("simulate", costs[0].name)
    started, clock = time.process_time(), time.perf_counter()
    many = list(_by_machines(options, costs[0], counts))
    needed = list(_by_fleet(options, costs))
    result = {
        "kind": "simulation: no machine was used",
        "load": {key: value for key, value in asdict(options).items() if key != "costs"},
        "costs": [asdict(cost) for cost in costs],
        "most_events_of_a_request": MOST_EVENTS,
        "cpu_seconds": time.process_time() - started,
        "wall_seconds": time.perf_counter() - clock,
        "by_machines": many,
        "needed": needed,
    }
    report.write(output, "serving.simulate", argv, result)
    note(f"Written to {output}")
    note(plot.draw(result, output))
    print(format_result(result))


def _compare(options: Options, costs: Costs, destination: Output, argv: Sequence[str]) -> None:
    """Write and print a measurement of `bench.serving` and its simulation."""
    assert options.beside is not None
    output = destination.path("simulate-beside", costs.name)
    pair = {"costs": asdict(costs), **beside(Path(options.beside), costs)}
    report.write(output, "serving.simulate", argv, pair)
    note(f"Written to {output}")
    print(format_beside(pair))


def _positive(value: float) -> str | None:
    return None if value > 0 else "must be more than 0"


def _numbers(flag: str, text: str) -> list[int]:
    """The numbers in a list separated by commas. Raises FlagError for one below 1."""
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(numbers) < 1:
        raise FlagError(f"{flag} takes numbers from 1 up, separated by commas, not {text!r}")
    return numbers


def _default_costs() -> Path:
    """The newest published speed of the demonstration model. Raises FlagError."""
    found = sorted(report.RESULTS.glob("speed-smollm2-135m-instruct-amd*.json"))
    if not found:
        raise FlagError("--costs: there are no published results here; name a file of bench.speed")
    return found[-1]


# -- the two questions ---------------------------------------------------------------------------------------------


def _by_machines(options: Options, costs: Costs, counts: Sequence[int]) -> Sequence[dict[str, Any]]:
    rows = []
    for count in tqdm(counts, desc="Machines", unit="size", disable=None):
        part = min(1.0, _MOST_REQUESTS / (options.rate * count * (options.warm + options.seconds)))
        shorter = replace(options, warm=part * options.warm, seconds=part * options.seconds)
        trace = _trace(shorter, options.rate * count)
        for routing in ROUTERS:
            fleet = _fleet(options, costs, count, routing, ())
            began = time.process_time()
            result = Simulation(trace, fleet, shorter.seconds, options.seed).run()
            row = {"machines": count, "routing": routing, "seconds": shorter.seconds, **summary(result, count)}
            rows.append(row | {"cpu_seconds": time.process_time() - began})
    return rows


def _by_fleet(options: Options, costs: Sequence[Costs]) -> Sequence[dict[str, Any]]:
    trace = _trace(options, options.load)
    fleets = [
        (cost, routing, tiers)
        for cost in costs
        for routing, tiers in (
            *((routing, ()) for routing in ROUTERS),
            *(("least", ("ram", "disk", network)) for network in _NETWORKS),
            ("affinity", ("ram",)),
            ("affinity", ("ram", "disk")),
            *(("affinity", ("ram", "disk", network)) for network in _NETWORKS),
        )
    ]
    rows = []
    for cost, routing, tiers in tqdm(fleets, desc="Fleets", unit="fleet", disable=None):
        count, result = needed(options, trace, _fleet(options, cost, 1, routing, tiers))
        names = [f"{tier} GbE" if isinstance(tier, int) else tier for tier in tiers]
        rows.append(
            {
                "cache": cost.cache,
                "routing": routing,
                "tiers": names,
                "machines": count,
                **summary(result, count or _MOST_MACHINES),
            }
        )
    return rows


def _trace(options: Options, rate: float) -> Trace:
    return make(rate, -options.warm, options.seconds, options.agents, options.context, options.seed)


def _fleet(options: Options, costs: Costs, count: int, routing: str, tiers: Sequence[str | int]) -> Fleet:
    """A fleet of `count` machines. tiers: "ram", "disk", or Gbit/s of the network to an unlimited remote store."""
    nbytes = costs.bytes_per_token
    sizes = [TierSize(parse_size(options.store) / nbytes)]
    remote = None
    for tier in tiers:
        if isinstance(tier, int):
            remote = TierSize(float("inf"), tier / 8 * 1e9 / nbytes, _NETWORK_LATENCY)
        else:
            size, speed, latency = _TIERS[tier]
            sizes.append(TierSize(size / nbytes, speed / nbytes, latency))
    settings = Settings(costs, min(options.parallel, costs.most_sequences))
    return Fleet(count, settings, sizes, remote, routing)


def needed(options: Options, trace: Trace, fleet: Fleet) -> tuple[int | None, Result]:
    """The least number of machines, to about 2 %, with which 95 % of the requests get their first token in time.

    None if no number is enough: where hits are rare, more machines make them rarer.
    """

    def result(count: int) -> Result:
        return Simulation(trace, replace(fleet, machines=count), options.seconds, options.seed).run()

    too_few, enough = 0, 1
    while (last := result(enough)).wait(95) > options.target:
        if enough >= _MOST_MACHINES:
            return None, last
        too_few, enough = enough, 2 * enough
    while enough - too_few > max(1, enough // 50):
        middle = (too_few + enough) // 2
        tried = result(middle)
        if tried.wait(95) > options.target:
            too_few = middle
        else:
            enough, last = middle, tried
    return enough, last


def summary(result: Result, machines: int) -> dict[str, Any]:
    """A row of the JSON."""
    prompt = max(1, result.prompt_tokens)
    return {
        "first_token_seconds": {str(percent): result.wait(percent) for percent in (50, 95, 99)},
        "hits": {name: tokens / prompt for name, tokens in result.hits.items()},
        "tokens_per_second": result.answer_tokens / result.seconds / machines,
        "requests_per_second": len(result.waits) / result.seconds / machines,
        "busy": result.busy,
        "requests": result.arrived,
        "events": result.events,
    }


if __name__ == "__main__":
    sys.exit(main())
