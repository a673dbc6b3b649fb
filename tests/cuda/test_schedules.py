"""Random schedules of requests on the device: arrivals, prefixes in common, cancellations, preemption. A CPU that is
given the answers one by one finds the same log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from engine import Engine, PromptOptions, SamplingParams
from engine.backends.cuda.ops import CudaOps
from engine.backends.numpy.ops import NumpyOps
from engine.outputs import Chunk, TokenLogprob
from tests.cuda.emulated import open_device
from tests.cuda.gpu_sizes import SIZES
from tests.sampling.constrained import InTurn
from tests.tiny import VOCABULARY, assert_idle, blocks_left, load_tiny

BLOCK, CONTEXT, AT_ONCE = 16, 160, 4
MOST_PROMPT, MOST_ANSWER = 70, 30
PARTS = 10  # tests, which may run in several processes


def prompts(rng: np.random.Generator, count: int) -> list[list[int]]:
    """Some begin as an earlier one does."""
    made: list[list[int]] = []
    for _ in range(count):
        old = made[rng.integers(len(made))] if made and rng.random() < 0.5 else []
        begun = old[: rng.integers(len(old) + 1)]
        made.append((begun + rng.integers(5, VOCABULARY, rng.integers(1, MOST_PROMPT)).tolist())[:MOST_PROMPT])
    return made


def run_schedule(
    engine: Engine, rng: np.random.Generator, options: PromptOptions
) -> list[tuple[list[int], list[TokenLogprob]]]:
    """The prompts and answers of a random schedule; of cancelled requests what there is of an answer."""
    asked = prompts(rng, int(rng.integers(2, 7)))
    outboxes: list[list[Chunk]] = [[] for _ in asked]
    with ExitStack() as stack:
        if rng.random() < 0.5:  # then not all requests find room at once
            least = -(-(MOST_PROMPT + MOST_ANSWER) // BLOCK)
            stack.enter_context(blocks_left(engine, least + int(rng.integers(3))))
        for prompt, outbox in zip(asked, outboxes, strict=True):
            params = greedy(int(rng.integers(1, MOST_ANSWER + 1)))
            ticket = engine.submit(prompt, params, options, into=outbox)
            for _ in range(rng.integers(12)):
                engine.work()
            if rng.random() < 0.1:
                ticket.cancel()
        while engine.work():
            pass
    chunks = [chunk for outbox in outboxes for chunk in outbox]
    assert not [chunk for chunk in chunks if isinstance(chunk, BaseException)]
    return [(prompt, tokens_of(outbox)) for prompt, outbox in zip(asked, outboxes, strict=True)]


def tokens_of(chunks: Iterable[Chunk]) -> list[TokenLogprob]:
    return [token for chunk in chunks for token in chunk.logprobs or ()]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, repeat_penalty=1, ignore_eos=True, logprobs=1)


def alone(engine: Engine, prompt: list[int], answer: list[TokenLogprob]) -> list[TokenLogprob]:
    """The same tokens from an engine that has nothing else to do, with its own log-probabilities."""
    forced = InTurn([[token.id] for token in answer], VOCABULARY)
    options = PromptOptions(cache_prompt=False)
    return tokens_of(engine.stream(prompt, greedy(len(answer)), options, constraint=forced))


# In nats, of a token: the largest difference, and the mean. In full precision only roundings differ. A vector near the
# edge of a code may get its neighbour's, which changes single tokens.
ALLOWED = {"f16": (0.05, 0.01), "balanced": (2.0, 0.15)}


# Prompts that begin as an earlier one read its blocks as codes, and a CPU that computes them does not.
@pytest.mark.parametrize(("types", "cache_prompt"), [("f16", True), ("balanced", False)])
@pytest.mark.parametrize("part", range(min(PARTS, SIZES.schedules)))
def test_answers_of_random_schedules_are_those_of_the_cpu(
    tiny_path: Path, part: int, types: str, cache_prompt: bool
) -> None:
    settings = {"block_size": BLOCK, "ctx_size": CONTEXT, "cache_type": types, "calibration": False}
    settings["parallel"] = AT_ONCE
    ops, options, off = CudaOps(open_device(checked=False)), PromptOptions(cache_prompt=cache_prompt), []
    with load_tiny(tiny_path, ops=ops, **settings) as engine, load_tiny(tiny_path, ops=NumpyOps(), **settings) as cpu:
        for number in range(part, SIZES.schedules, PARTS):
            for prompt, answer in run_schedule(engine, np.random.default_rng(number), options):
                if answer:
                    wanted = alone(cpu, prompt, answer)
                    off += [abs(a.logprob - b.logprob) for a, b in zip(answer, wanted, strict=True)]
        assert_idle(engine)
    most, mean = ALLOWED[types]
    assert len(off) > 50
    assert max(off) <= most
    assert np.mean(off) <= mean
