"""The tables of a load, made from its JSON for the terminal and the documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polarlm.bench import report
from polarlm.bench.speed.contestants import OURS
from polarlm.engine.errors import counted

_SHOWN = (50, 95, 99)  # percentiles


def format_result(result: Mapping[str, Any]) -> str:
    """The text of a summary and a table of latencies; with other servers, a table of all."""
    load, errors = result["load"], result["errors"]
    failed = ", ".join(f"{count} × {kind}" for kind, count in errors.items()) or "none"
    rows = [
        (name, *(_milliseconds(result["latencies"][key]["percentiles"], percent) for percent in _SHOWN))
        for key, name in (
            ("first_token_seconds", "first token"),
            ("between_tokens_seconds", "between two tokens"),
            ("request_seconds", "whole answer"),
            ("behind_arrival_seconds", "until a client was free"),
        )
    ]
    text = (
        f"{result['model']}: {load['clients']} clients, {load['rate']:g} requests/s (Poisson), prompts of "
        f"{load['shared_prefix']} shared and {load['prompt_tokens']} own tokens, answers of {load['max_tokens']}.\n"
        f"{result['requests']} requests in {result['seconds']:.1f} s: {result['tokens_per_second']:,.1f} tokens/s, "
        f"{result['requests_per_second']:.2f} requests/s. Errors: {failed}.\n"
        f"Found in the cache: {100 * result['prefix_hit_rate']:.1f} % of the prompts' tokens. At most "
        f"{result['peak_blocks']} of {result['blocks']} blocks held, {result['peak_running']} requests in a step.\n\n"
        + report.table(("milliseconds", *(f"p{percent}" for percent in _SHOWN)), rows)
    )
    return f"{text}\n\n{servers_table(result)}" if "peers" in result else text


def servers_table(result: Mapping[str, Any]) -> str:
    """A table with a line for our server, and one for each number of threads of another engine's."""
    rows = []
    for one in ({"name": OURS, **result}, *result["peers"]):
        name = f"{one['name']} {one.get('version', '')}".rstrip()
        name += f", {counted(one['threads'], 'thread')}" if "threads" in one else ""
        if "failure" in one:
            rows.append([name, one["failure"], *["—"] * 5])
            continue
        waits = [one["latencies"][f"{key}_seconds"]["percentiles"] for key in ("first_token", "between_tokens")]
        cells = [_milliseconds(percentiles, percent) for percentiles in waits for percent in (50, 95)]
        rows.append([name, f"{one['tokens_per_second']:,.1f}", *cells, str(sum(one["errors"].values()))])
    header = ["server", "tokens/s", "first token ms, p50", "p95", "between two, p50", "p95", "errors"]
    return report.table(header, rows)


def _milliseconds(percentiles: Sequence[float], percent: int) -> str:
    return f"{1e3 * percentiles[percent]:,.1f}" if percentiles else "—"
