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

import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import httpx
import numpy as np

from polarlm.bench.result import Result
from polarlm.bench.serving.client import Answer, ask, connect
from polarlm.bench.serving.options import AGENTS, FIRST_TOKEN, ConversationOptions, Options
from polarlm.bench.serving.servers import own_server
from polarlm.bench.speed.contestants import OURS
from polarlm.bench.speed.starts import ready_memory
from polarlm.engine import EngineError
from polarlm.engine.cli.commands import note
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.config import parse_size
from polarlm.engine.loading.calibration import TEXT_FILE

_WRITTEN_SECONDS = 2.0  # seconds after which an idle server has written its blocks
_MEMORY = 1 << 30  # bytes that a server may touch for the first time in a turn
_WORDS_PER_TOKEN = 0.75  # roughly, in English
_ANSWER = 32  # tokens of an answer


class Agent:
    """The client in one conversation."""

    def __init__(self, talk: ConversationOptions, max_tokens: int, seed: int, number: int) -> None:
        self._talk, self._max_tokens = talk, max_tokens
        self._rng = np.random.default_rng((seed, number))
        self._words = TEXT_FILE.read_text(encoding="utf-8").split()
        self._messages: list[dict[str, str]] = []

    def ask(self, http: httpx.Client) -> Answer:
        """Send the next turn and append its answer. Raises EngineError."""
        tokens = self._talk.turn if self._messages else self._talk.opening
        words = self._rng.choice(self._words, max(1, round(_WORDS_PER_TOKEN * tokens)))
        self._messages.append({"role": "user", "content": " ".join(words)})
        body = {"messages": self._messages, "max_tokens": self._max_tokens, "temperature": 0}
        answer = ask(http, "/v1/chat/completions", {**body, "ignore_eos": True}, time.perf_counter())
        if answer.error is not None:
            raise EngineError(f"A server did not answer as expected: {answer.error}")
        self._messages.append({"role": "assistant", "content": answer.text})
        return answer


def measure(options: Options, talk: ConversationOptions, model: str | None) -> Result:
    """The rows of `--only agents` or `--only pressure`. Raises FlagError or EngineError."""
    max_tokens = options.max_tokens or _ANSWER
    settings = {"threads": options.threads, "max_tokens": max_tokens, "seed": options.seed, **asdict(talk)}
    result, agent = Result({"options": settings}), partial(Agent, talk, max_tokens, options.seed)
    flags = [] if model is None else ["--weights", model]
    flags += ["--threads", str(options.threads), "--parallel", "1"]
    if options.only == AGENTS:
        _come_back(result, [agent(number) for number in range(talk.agents)], flags)
        return result
    tokens = talk.opening + (talk.rounds - 1) * talk.turn + talk.rounds * max_tokens  # tokens of a conversation, about
    memory, types = parse_size(talk.kv_memory), map(str.strip, talk.types.split(","))
    for times, cache_type, disk in itertools.product(_multiples(talk.times), types, (False, True)):
        who, kv = f"{cache_type} and a disk" if disk else cache_type, ["--kv-memory", talk.kv_memory]
        with (
            tempfile.TemporaryDirectory() as folder,
            own_server([*flags, *kv, "--cache-type", cache_type, *(_disk(folder) if disk else [])]) as url,
        ):
            ready_memory(2 * memory)
            with connect(url) as http:
                per_token = http.get("/stats").json()["f16_bytes_per_token"]
            agents = [agent(number) for number in range(math.ceil(times * memory / per_token / tokens))]
            _ask_all(result, f"{len(agents)} conversations, {times:g}×", who, url, agents, talk.rounds)
    return result


def _come_back(result: Result, agents: Sequence[Agent], flags: Sequence[str]) -> None:
    """Add the turns of all agents by when or where they are sent. Raises EngineError."""

    def visit(when: str, url: str) -> None:
        ready_memory(_MEMORY)
        _ask_all(result, when, OURS, url, agents, 1)
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


def _ask_all(result: Result, subject: str, who: str, url: str, agents: Sequence[Agent], rounds: int) -> None:
    """Add the turns of the last round, one agent after the other, and the first tokens of the earlier ones. Raises
    EngineError."""
    with connect(url) as http:
        for number in range(1, rounds + 1):
            turns = [agent.ask(http) for agent in agents]
            seconds = [turn.first_token for turn in turns]
            note(f"{who}, {subject}: round {number}: {statistics.median(seconds):.2f} s")
            last, tiers = number == rounds, [turn.cached_from for turn in turns]
            quantity = FIRST_TOKEN if last else f"{FIRST_TOKEN}, round {number}"
            result.add(subject, who, quantity, seconds, cached_from=tiers)
        result.add(subject, who, "prompt tokens", [turn.prompt_tokens for turn in turns])


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
