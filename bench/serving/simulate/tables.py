"""Tables of the results of a simulation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polarlm.bench import report

_ROUTING = {"random": "random", "least": "fewest requests", "affinity": "affinity"}


def format_result(result: Mapping[str, Any]) -> str:
    """The text of the assumptions and the two tables."""
    load = result["load"]
    sources = "\n".join(f"{cost['cache']}: {cost['source']}" for cost in result["costs"])
    return (
        f"SIMULATION. Costs of a step and of a prompt:\n{sources}\n\n"
        f"{load['rate']:g} requests/s for each machine, {100 * load['agents']:.0f} % agents'; the store alone, "
        f"{result['costs'][0]['cache']}\n\n{by_machines(result)}\n\n"
        f"Machines for {load['load']:g} requests/s, so that 95 % have their first token within {load['target']:g} s\n\n"
        f"{needed(result)}"
    )


def by_machines(result: Mapping[str, Any]) -> str:
    """A table with a row for each number of machines and routing."""
    rows = [
        (
            f"{row['machines']:,}, {_ROUTING[row['routing']]}",
            f"{100 * row['hits']['store']:.0f} %",
            *_waits(row),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['requests']:,}",
            f"{row['seconds']:.0f}",
            f"{row['cpu_seconds']:.1f}",
        )
        for row in result["by_machines"]
    ]
    header = (
        "machines, routing",
        "cached",
        "p50 ms",
        "p95 ms",
        "p99 ms",
        "tokens/s each",
        "requests",
        "measured s",
        "CPU s",
    )
    return report.table(header, rows)


def needed(result: Mapping[str, Any]) -> str:
    """A table with a row for each routing and set of tiers, and the number of machines for every cache type."""
    found = {(row["cache"], row["routing"], tuple(row["tiers"])): row for row in result["needed"]}
    caches = [cost["cache"] for cost in result["costs"]]
    rows = []
    for routing, tiers in dict.fromkeys(key[1:] for key in found):
        mine = [found[cache, routing, tiers] for cache in caches]
        hits = mine[0]["hits"]
        rows.append(
            (
                f"{_ROUTING[routing]}; {', '.join(('store', *tiers))}",
                *("none" if row["machines"] is None else f"{row['machines']:,}" for row in mine),
                *(f"{100 * hits[tier]:.0f} %" for tier in ("store", "ram", "disk", "remote")),
                *_waits(mine[0]),
            )
        )
    columns = (f"machines, {cache}" for cache in caches)
    header = ("routing; tiers", *columns, "store", "ram", "disk", "remote", "p50 ms", "p95 ms", "p99 ms")
    return report.table(header, rows)


def _waits(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{1e3 * row['first_token_seconds'][percent]:,.0f}" for percent in ("50", "95", "99"))
