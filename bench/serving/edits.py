"""How much of their prompts agents have read again when they edit what lies behind them.

`--only edits`: an agent calls tools, turn after turn. Once its context is longer than three openings, it empties the
results of tools that it needs no more: all but the last three at once, or the oldest ones until the rest fits. What
follows the first change has to be read again, whatever is cached; what is read beyond that is the cache's doing. The
engine runs in this process, and answers are of any tokens.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from polarlm.bench.result import Result
from polarlm.bench.serving.options import ConversationOptions, Options
from polarlm.bench.serving.tables import EMPTIED, LEAST, PROMPTS, RATIO, READ
from polarlm.engine import Engine, SamplingParams
from polarlm.engine.cli.commands import note
from polarlm.engine.state.prefix import common_prefix

_TURNS, _KEPT, _LIMIT = 40, 3, 3  # of a conversation, results, and openings
_RESULT, _SPREAD, _LONGEST = 330, 1.0, 4000  # tokens of a result: the median, of their logarithm, and at most
_ANSWER = 30, 90  # tokens, from and to
_EMPTY = 5  # tokens of a result that is emptied


class Request(NamedTuple):
    """A prompt's ids, how many of them an earlier prompt or its answer begins with, and tokens of the answer."""

    ids: list[int]
    common: int
    max_tokens: int


def agent(
    subject: str, talk: ConversationOptions, control_id: int, vocabulary: int, seed: int
) -> Generator[Request, Sequence[int], None]:
    """Yield an agent's requests, and take the answers' ids."""
    rng = np.random.default_rng(seed)

    def text(count: float) -> list[int]:
        return [control_id, *rng.integers(vocabulary // 4, vocabulary // 2, int(count)).tolist()]

    def prompt() -> list[int]:
        return [*chain.from_iterable(messages), control_id]

    messages, results, seen = [text(talk.opening)], list[int](), list[list[int]]()
    for _ in range(_TURNS):
        ids = prompt()
        most = _LIMIT * talk.opening
        is_full = len(ids) > most
        for number in results[:-_KEPT]:
            if is_full and (subject == EMPTIED[0] or len(ids) > most):
                messages[number] = messages[number][: 1 + _EMPTY]
                ids = prompt()
        common = max((common_prefix(ids, earlier) for earlier in seen), default=0)
        answer = yield Request(ids, common, int(rng.integers(*_ANSWER)))
        seen.append([*ids, *answer])
        results.append(len(messages) + 1)
        count = max(_EMPTY, min(_LONGEST, rng.lognormal(np.log(_RESULT), _SPREAD)))
        messages += [[control_id, *answer], text(count)]


def measure(options: Options, talk: ConversationOptions, model: str | None) -> Result:
    """The rows of `--only edits`. Raises EngineError."""
    result = Result({"options": {"seed": options.seed, "agents": talk.agents, "opening": talk.opening}})
    for subject in EMPTIED:
        tokens = talk.agents * ((_LIMIT + 1) * talk.opening + _LONGEST)  # all of them fit
        with Engine.load(model, verbose=note, threads=options.threads, parallel=talk.agents, ctx_size=tokens) as engine:
            control_id = min(engine.model.tokenizer.control_tokens().values())
            agents = [
                agent(subject, talk, control_id, engine.model.config.vocab_size, options.seed + number)
                for number in range(talk.agents)
            ]
            requests = [next(one) for one in agents]
            counts = {READ: 0, LEAST: 0, PROMPTS: 0}
            for turn in range(_TURNS):
                for number, one in enumerate(agents):
                    ids, common, max_tokens = requests[number]
                    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
                    answer = engine.generate(ids, params)
                    counts[READ] += len(ids) - answer.usage.cached_tokens
                    counts[LEAST] += len(ids) - common
                    counts[PROMPTS] += len(ids)
                    if turn < _TURNS - 1:
                        requests[number] = one.send(answer.token_ids)
                note(f"{subject}: turn {turn + 1} of {_TURNS}, {counts[READ]:,} tokens read")
            result.add_all(subject, engine.model.name, {**counts, RATIO: counts[READ] / counts[LEAST]})
    return result
