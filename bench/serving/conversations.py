"""Time to the first token when conversations continue.

`--only agents`: agents open conversations in turn and then send a next turn: to the same server, to the same server
after a restart, and to another one, which fetches blocks from the first (`--cache-remote`).

`--only pressure`: for each cache type a server has the same memory for keys and values. Conversations take turns on it,
round after round: twice, four and eight times as many as would fit in half precision. A conversation whose blocks were
evicted is computed again, or read from the disk where the server has one.

Only one request runs at a time, so that the time depends on the tier that has its prefix. All servers run on this
machine.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from polarlm.bench.report import table
from polarlm.bench.serving.options import AGENTS, ConversationOptions, Options
from polarlm.bench.serving.process import own_server
from polarlm.bench.speed.starts import ready_memory
from polarlm.engine import EngineError
from polarlm.engine.cli.commands import note
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.loading.calibration import TEXT_FILE
from polarlm.engine.state.plan import parse_size

if TYPE_CHECKING:
    import httpx

_PATIENCE = 600.0  # seconds to wait for data
_WRITTEN_SECONDS = 2.0  # seconds after which an idle server has written its blocks
_MEMORY = 1 << 30  # bytes that a server may touch for the first time in a turn
_WORDS_PER_TOKEN = 0.75  # roughly, in English
_ANSWER = 32  # tokens of an answer


@dataclass(frozen=True)
class Turn:
    """A request as its agent saw it. seconds: to the first token. cached_from: tier → cached tokens."""

    seconds: float
    prompt_tokens: int
    cached_from: dict[str, int]


class Agent:
    """The client in one conversation."""

    def __init__(self, talk: ConversationOptions, max_tokens: int, seed: int, number: int) -> None:
        self._talk, self._max_tokens = talk, max_tokens
        self._rng = np.random.default_rng((seed, number))
        self._words = TEXT_FILE.read_text(encoding="utf-8").split()
        self._messages: list[dict[str, str]] = []

    async def ask(self, http: httpx.AsyncClient) -> Turn:
        """Send the next turn and append its answer. Raises EngineError."""
        from polarlm.bench.serving.client import ask

        tokens = self._talk.turn if self._messages else self._talk.opening
        words = self._rng.choice(self._words, max(1, round(_WORDS_PER_TOKEN * tokens)))
        self._messages.append({"role": "user", "content": " ".join(words)})
        body = {"messages": self._messages, "max_tokens": self._max_tokens, "temperature": 0}
        answer = await ask(http, "/v1/chat/completions", {**body, "ignore_eos": True}, time.perf_counter())
        if answer.error is not None:
            raise EngineError(f"A server did not answer as expected: {answer.error}")
        self._messages.append({"role": "assistant", "content": answer.text})
        return Turn(answer.first_token, answer.prompt_tokens, answer.cached_from)


def measure(options: Options, talk: ConversationOptions, model: str | None) -> dict[str, Any]:
    """The turns of `--only agents`, or the rows of `--only pressure`. Raises FlagError or EngineError."""
    max_tokens = options.max_tokens or _ANSWER
    about = {"options": {"threads": options.threads, "max_tokens": max_tokens, "seed": options.seed, **asdict(talk)}}
    agent = partial(Agent, talk, max_tokens, options.seed)
    flags = [] if model is None else ["--weights", model]
    flags += ["--threads", str(options.threads), "--parallel", "1"]
    if options.only == AGENTS:
        return {**about, "turns": _returning([agent(number) for number in range(talk.agents)], flags)}
    tokens = talk.opening + (talk.rounds - 1) * talk.turn + talk.rounds * max_tokens  # tokens of a conversation, about
    rows = []
    for times in _multiples(talk.times):
        for cache_type in map(str.strip, talk.types.split(",")):
            for disk in (False, True):
                row = {"times": times, "cache_type": cache_type, "disk": disk}
                rows.append({**row, "rounds": _crowded(row, agent, talk, tokens, flags)})
    return {**about, "rows": rows}


def _returning(agents: Sequence[Agent], flags: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """When or where turns are sent → the turns of all agents. Raises EngineError."""
    turns: dict[str, list[dict[str, Any]]] = {}

    def visit(when: str, url: str) -> None:
        ready_memory(_MEMORY)
        (turns[when],) = asyncio.run(_ask_all(when, url, agents, 1))
        time.sleep(_WRITTEN_SECONDS)

    with tempfile.TemporaryDirectory() as folder:
        first = [*flags, *_disk(folder), "--share-blocks"]
        with own_server(first) as url:
            visit("new conversation", url)
            visit("next turn", url)
        with own_server(first) as url:
            visit("next turn, after a restart", url)
            with own_server([*flags, "--cache-remote", url]) as second:
                visit("next turn, on another server", second)
    return turns


def _crowded(
    row: Mapping[str, Any], agent: Callable[[int], Agent], talk: ConversationOptions, tokens: int, flags: Sequence[str]
) -> list[list[dict[str, Any]]]:
    """The turns of each round, of as many conversations of `tokens` tokens as `times` says. Raises EngineError."""
    import httpx

    memory = parse_size(talk.kv_memory)
    with tempfile.TemporaryDirectory() as folder:
        flags = [*flags, "--kv-memory", talk.kv_memory, "--cache-type", row["cache_type"]]
        with own_server([*flags, *(_disk(folder) if row["disk"] else [])]) as url:
            ready_memory(2 * memory)
            per_token = httpx.get(f"{url}/stats", timeout=_PATIENCE).json()["f16_bytes_per_token"]
            agents = [agent(number) for number in range(math.ceil(row["times"] * memory / per_token / tokens))]
            return asyncio.run(_ask_all(_name(row), url, agents, talk.rounds))


async def _ask_all(what: str, url: str, agents: Sequence[Agent], rounds: int) -> list[list[dict[str, Any]]]:
    """The turns of each round, one agent after the other. what: their name for notes. Raises EngineError."""
    import httpx

    turns: list[list[dict[str, Any]]] = []
    async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE) as http:
        for number in range(rounds):
            turns.append([asdict(await agent.ask(http)) for agent in agents])
            seconds = statistics.median(turn["seconds"] for turn in turns[-1])
            note(f"{what}, {len(agents)} conversations: round {number + 1}: {seconds:.2f} s")
    return turns


def _disk(folder: str) -> list[str]:
    return ["--cache-disk", "64G", "--cache-disk-folder", folder]


def _multiples(text: str) -> list[float]:
    try:
        multiples = [float(part) for part in text.split(",")]
    except ValueError:
        multiples = []
    if not multiples or not all(0 < times <= 1000 for times in multiples):
        raise FlagError(f"--times must be numbers above 0 such as 2,4,8, not {text!r}")
    return multiples


# -- tables --------------------------------------------------------------------------------------------------------


def format_result(result: Mapping[str, Any]) -> str:
    """The table of a result, of either kind."""
    return _returning_table(result["turns"]) if "turns" in result else _crowded_table(result["rows"])


def _returning_table(turns_by_visit: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    rows = []
    for when, turns in turns_by_visit.items():
        seconds = [turn["seconds"] for turn in turns]
        average = f"{sum(turn['prompt_tokens'] for turn in turns) / len(turns):,.0f}"
        rows.append([when, average, places(turns), f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}"])
    return table(["", "prompt tokens", "of them found", "first token s, median", "slowest"], rows)


def _crowded_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The last round's median time to the first token, and the tiers of its prompts, by type and conversations."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        turns = row["rounds"][-1]
        column = f"{len(turns)} conversations, {row['times']:g}×"
        seconds = statistics.median(turn["seconds"] for turn in turns)
        cells.setdefault(_name(row), {})[column] = f"{seconds:.2f} s, {places(turns)}"
    columns = dict.fromkeys(column for row in cells.values() for column in row)
    return table(["", *columns], [[name, *(row.get(column, "") for column in columns)] for name, row in cells.items()])


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['cache_type']} and a disk" if row["disk"] else str(row["cache_type"])


def places(turns: Sequence[Mapping[str, Any]]) -> str:
    """Which tiers had how much of the turns' prompts, as in "91 % disk"; a dash if none had anything."""
    cached: Counter[str] = Counter()
    for turn in turns:
        cached.update(turn["cached_from"])
    tokens = sum(turn["prompt_tokens"] for turn in turns)
    return ", ".join(f"{100 * count / tokens:.0f} % {place}" for place, count in cached.items() if count) or "—"
