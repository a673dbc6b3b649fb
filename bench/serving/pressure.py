"""`python -m polarlm.bench.serving.pressure`: time to the first token when conversations need more memory than fits.

For each cache type a server has the same memory for keys and values. Conversations take turns on it, one request at a
time, round after round: twice, four and eight times as many as would fit in half precision. A conversation whose blocks
were evicted is computed again, or read from the disk where the server has one.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polarlm.bench import report
from polarlm.bench.command import HF_REPO_HELP, WEIGHTS_HELP, at_least, model_named, needs_http
from polarlm.bench.report import Output, table
from polarlm.bench.serving.agents import PATIENCE, Agent, Conversation, Turn, places
from polarlm.bench.serving.process import own_server
from polarlm.bench.speed.starts import ready_memory
from polarlm.engine.cli.commands import command, note
from polarlm.engine.cli.flags import FlagError, parse
from polarlm.engine.config import setting
from polarlm.engine.state.plan import parse_size


@dataclass(frozen=True)
class Options:
    """The flags: the servers and how much they lack."""

    weights: str | None = setting(None, "--weights", "-m", metavar="PATH", help=WEIGHTS_HELP)
    hf_repo: str | None = setting(None, "-hf", "--hf-repo", metavar="USER/REPO[:QUANT]", help=HF_REPO_HELP)
    threads: int = setting(0, "--threads", metavar="N", help="CPU threads of a server; 0 follows OMP_NUM_THREADS")
    types: str = setting("f16,q8_0,balanced", "--types", metavar="TYPE,…", help="cache types")
    kv_memory: str = setting("64M", "--kv-memory", metavar="SIZE", help="memory for keys and values")
    times: str = setting(
        "2,4,8", "--times", metavar="N,…", help="conversations, as a multiple of those that fit in half precision"
    )
    rounds: int = setting(3, "--rounds", metavar="N", help="turns of each conversation")


@command
def main(argv: Sequence[str]) -> None:
    """Measures, writes JSON, prints the table."""
    options, conversation, destination = parse(
        argv,
        {"Servers": Options, "Conversations": Conversation, "Output": Output},
        prog="python -m polarlm.bench.serving.pressure",
        description="Time to the first token when conversations need more memory than the KV store has.",
        checks={
            **dict.fromkeys(("rounds", "opening", "turn", "max_tokens"), at_least(1)),
            **dict.fromkeys(("threads", "seed"), at_least(0)),
        },
    )
    needs_http()
    model = model_named(options.weights, options.hf_repo)
    output = destination.path("pressure", "demo" if model is None else Path(model).name.removesuffix(".gguf"))
    rows = []
    for times in _multiples(options.times):
        for cache_type in options.types.split(","):
            for disk in (False, True):
                flags = [] if model is None else ["--weights", model]
                rows.append(_measured(options, conversation, flags, times, cache_type.strip(), disk))
    result = {"options": asdict(options) | asdict(conversation), "rows": rows}
    report.write(output, "serving.pressure", argv, result)
    note(f"Written to {output}")
    print(format_result(result))


def _multiples(text: str) -> list[float]:
    """The numbers of --times. Raises FlagError."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < times <= 1000 for times in found):
        raise FlagError(f"--times must be numbers above 0 such as 2,4,8, not {text!r}")
    return found


def _measured(
    options: Options, conversation: Conversation, flags: Sequence[str], times: float, cache_type: str, disk: bool
) -> dict[str, Any]:
    """A row of the result: the turns of each round, of as many conversations as `times` says. Raises EngineError."""
    import httpx

    async def ask_all(url: str) -> list[list[Turn]]:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as http:
            half = (await http.get("/stats")).json()["f16_bytes_per_token"]
            tokens = times * parse_size(options.kv_memory) / half
            count = math.ceil(tokens / conversation.tokens(options.rounds))
            agents = [Agent(conversation, number) for number in range(count)]
            rounds = []
            for number in range(options.rounds):
                rounds.append([await agent.ask(http) for agent in agents])
                seconds = statistics.median(turn.seconds for turn in rounds[-1])
                note(f"{_name(cache_type, disk)}, {count} conversations: round {number + 1}: {seconds:.2f} s")
            return rounds

    with tempfile.TemporaryDirectory() as folder:
        memory = ["--kv-memory", options.kv_memory, "--parallel", "1", "--threads", str(options.threads)]
        tier = ["--cache-disk", "64G", "--cache-disk-folder", folder] if disk else []
        with own_server([*flags, *memory, *tier, "--cache-type", cache_type]) as url:
            ready_memory(2 * parse_size(options.kv_memory))
            rounds = asyncio.run(ask_all(url))
    turns = [[asdict(turn) for turn in turns] for turns in rounds]
    return {"times": times, "cache_type": cache_type, "disk": disk, "rounds": turns}


def _name(cache_type: str, disk: bool) -> str:
    return f"{cache_type} and a disk" if disk else cache_type


def format_result(result: Mapping[str, Any]) -> str:
    """The table of a result: the median time to the first token in the last round, and how much of its prompts was
    found, of each type and number of conversations."""
    cells: dict[str, dict[str, str]] = {}
    for row in result["rows"]:
        turns = row["rounds"][-1]
        column = f"{len(turns)} conversations, {row['times']:g}×"
        seconds = statistics.median(turn["seconds"] for turn in turns)
        cells.setdefault(_name(row["cache_type"], row["disk"]), {})[column] = f"{seconds:.2f} s, {places(turns)}"
    columns = dict.fromkeys(column for row in cells.values() for column in row)
    return table(["", *columns], [[name, *(row.get(column, "") for column in columns)] for name, row in cells.items()])


if __name__ == "__main__":
    sys.exit(main())
