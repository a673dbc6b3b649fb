"""`python -m polarlm.bench.serving.agents`: time to the first token when conversations continue.

Agents open conversations in turn and then send a next turn: to the same server, to the same server after a restart, and
to another one, which fetches blocks from the first (`--cache-remote`). Only one request runs at a time, so that the
time depends on the tier that has its prefix. Both servers run on this machine.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from polarlm.bench import report
from polarlm.bench.command import HF_REPO_HELP, WEIGHTS_HELP, at_least, model_named, needs_http
from polarlm.bench.report import Output, table
from polarlm.bench.serving.process import own_server
from polarlm.bench.speed.starts import ready_memory
from polarlm.engine import EngineError
from polarlm.engine.cli.commands import command, note
from polarlm.engine.cli.flags import parse
from polarlm.engine.config import setting
from polarlm.engine.loading.calibration import TEXT_FILE

if TYPE_CHECKING:
    import httpx

PATIENCE = 600.0  # seconds to wait for data
_WRITTEN_SECONDS = 2.0  # seconds after which an idle server has written its blocks
_MEMORY = 1 << 30  # bytes that a server may touch for the first time in a turn
_WORDS_PER_TOKEN = 0.75  # roughly, in English


@dataclass(frozen=True)
class Options:
    """The flags: the servers, and how many conversations."""

    weights: str | None = setting(None, "--weights", "-m", metavar="PATH", help=WEIGHTS_HELP)
    hf_repo: str | None = setting(None, "-hf", "--hf-repo", metavar="USER/REPO[:QUANT]", help=HF_REPO_HELP)
    threads: int = setting(0, "--threads", metavar="N", help="CPU threads of a server; 0 follows OMP_NUM_THREADS")
    agents: int = setting(4, "--agents", metavar="N", help="conversations")


@dataclass(frozen=True)
class Conversation:
    """The flags: what agents write."""

    opening: int = setting(2000, "--opening", metavar="N", help="tokens that a conversation opens with, about")
    turn: int = setting(200, "--turn", metavar="N", help="tokens of each further turn, about")
    max_tokens: int = setting(32, "--max-tokens", metavar="N", help="tokens of an answer")
    seed: int = setting(0, "--seed", metavar="N", help="of what agents write")

    def tokens(self, turns: int) -> int:
        """How long a conversation of that many turns is, about."""
        return self.opening + (turns - 1) * self.turn + turns * self.max_tokens


@dataclass(frozen=True)
class Turn:
    """A request as its agent saw it. seconds: to the first token. cached_from: tier → cached tokens."""

    seconds: float
    prompt_tokens: int
    cached_from: dict[str, int]


class Agent:
    """The client in one conversation."""

    def __init__(self, conversation: Conversation, number: int) -> None:
        self._conversation = conversation
        self._rng = np.random.default_rng((conversation.seed, number))
        self._words = TEXT_FILE.read_text(encoding="utf-8").split()
        self._messages: list[dict[str, str]] = []

    async def ask(self, http: httpx.AsyncClient) -> Turn:
        """Send the next turn and append its answer. Raises EngineError."""
        from polarlm.bench.serving.client import ask

        tokens = self._conversation.turn if self._messages else self._conversation.opening
        words = self._rng.choice(self._words, max(1, round(_WORDS_PER_TOKEN * tokens)))
        self._messages.append({"role": "user", "content": " ".join(words)})
        body = {"messages": self._messages, "max_tokens": self._conversation.max_tokens, "temperature": 0}
        answer = await ask(http, "/v1/chat/completions", {**body, "ignore_eos": True}, time.perf_counter())
        if answer.error is not None:
            raise EngineError(f"A server did not answer as expected: {answer.error}")
        self._messages.append({"role": "assistant", "content": answer.text})
        return Turn(answer.first_token, answer.prompt_tokens, answer.cached_from)


@command
def main(argv: Sequence[str]) -> None:
    """Measures, writes JSON, prints the table."""
    options, conversation, destination = parse(
        argv,
        {"Measurement": Options, "Conversations": Conversation, "Output": Output},
        prog="python -m polarlm.bench.serving.agents",
        description="Time to the first token of conversations that come back, also after a restart or elsewhere.",
        checks={
            **dict.fromkeys(("agents", "opening", "turn", "max_tokens"), at_least(1)),
            **dict.fromkeys(("threads", "seed"), at_least(0)),
        },
    )
    needs_http()
    model = model_named(options.weights, options.hf_repo)
    output = destination.path("agents", "demo" if model is None else Path(model).name.removesuffix(".gguf"))
    turns = _measure(options, conversation, [] if model is None else ["--weights", model])
    result = {
        "options": asdict(options) | asdict(conversation),
        "turns": {when: [asdict(turn) for turn in own] for when, own in turns.items()},
    }
    report.write(output, "serving.agents", argv, result)
    note(f"Written to {output}")
    print(format_result(result))


def _measure(options: Options, conversation: Conversation, flags: Sequence[str]) -> dict[str, list[Turn]]:
    """When or where turns are sent → the turns of all agents. Raises EngineError."""
    import httpx

    agents = [Agent(conversation, number) for number in range(options.agents)]
    flags = [*flags, "--threads", str(options.threads), "--parallel", "1"]
    turns: dict[str, list[Turn]] = {}

    async def ask_all(url: str) -> list[Turn]:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as http:
            return [await agent.ask(http) for agent in agents]

    def visit(when: str, url: str) -> None:
        ready_memory(_MEMORY)
        turns[when] = asyncio.run(ask_all(url))
        time.sleep(_WRITTEN_SECONDS)

    with tempfile.TemporaryDirectory() as folder:
        first = [*flags, "--cache-disk", "64G", "--cache-disk-folder", folder, "--share-blocks"]
        with own_server(first) as url:
            visit("new conversation", url)
            visit("next turn", url)
        with own_server(first) as url:
            visit("next turn, after a restart", url)
            with own_server([*flags, "--cache-remote", url]) as second:
                visit("next turn, on another server", second)
    return turns


def format_result(result: dict[str, Any]) -> str:
    """The table of a result."""
    rows = []
    for when, turns in result["turns"].items():
        seconds = [turn["seconds"] for turn in turns]
        average = f"{sum(turn['prompt_tokens'] for turn in turns) / len(turns):,.0f}"
        rows.append([when, average, places(turns), f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}"])
    headings = ["", "prompt tokens", "of them found", "first token s, median", "slowest"]
    return table(headings, rows)


def places(turns: Sequence[Mapping[str, Any]]) -> str:
    """Which tiers had how much of the turns' prompts, as in "91 % disk"; a dash if none had anything."""
    found: Counter[str] = Counter()
    for turn in turns:
        found.update(turn["cached_from"])
    tokens = sum(turn["prompt_tokens"] for turn in turns)
    return ", ".join(f"{100 * count / tokens:.0f} % {place}" for place, count in found.items() if count) or "—"


if __name__ == "__main__":
    sys.exit(main())
