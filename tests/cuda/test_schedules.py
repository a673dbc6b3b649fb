"""Random schedules of requests on the device: arrivals, prefixes in common, cancellations, preemption. A CPU that is
given the answers one by one finds the same log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Engine, PromptOptions, SamplingParams
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.outputs import Chunk, Completion, TokenLogprob, fold
from polarlm.engine.sampling.sample import Fetch
from tests.cuda.emulated import open_device
from tests.cuda.gpu_sizes import SIZES
from tests.sampling.constrained import InTurn
from tests.tiny import VOCABULARY, assert_idle, blocks_left, by_count, load_tiny

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
ALLOWED = {"f16": (0.05, 0.01), "ring4/ring3.5": (2.0, 0.15)}


# Prompts that begin as an earlier one read its blocks as codes, and a CPU that computes them does not.
# Every part has schedules of its own, and what one finds in codes it need not find in halves.
@pytest.mark.slow
@pytest.mark.parametrize(("types", "cache_prompt"), [("f16", True), ("ring4/ring3.5", False)])
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


def compare_with_waiting(
    make_ops: Callable[[], CudaOps], path: Path, monkeypatch: pytest.MonkeyPatch, *, sets: Sequence[Any] | None = None
) -> None:
    """Steps that begin before the last one's tokens are known have the tokens of steps that wait for them.

    Of requests that end at different times, the first by a stop token, behind which a step has begun. sets: of a
    constraint of the second one, which draws when it knows the last token.
    """
    settings = {"block_size": BLOCK, "ctx_size": 64, "cache_type": "balanced", "calibration": False, "parallel": 3}
    begun: list[type] = []

    def answers(*stop: int, ahead: bool) -> list[Completion]:
        outboxes: list[list[Chunk]] = [[], [], []]
        with load_tiny(path, ops=make_ops(), **settings) as engine:
            if not ahead:
                engine._model.ops.fetch_later = None
            by_count(engine, monkeypatch)
            step = engine._model.step
            monkeypatch.setattr(engine._model, "step", lambda *args: begun.append(type(args[0].ids)) or step(*args))
            for number, outbox in enumerate(outboxes):
                params = SamplingParams(temperature=0.9, seed=number, max_tokens=8 + 3 * number, ignore_eos=True)
                params = replace(params, stop_token_ids=() if number else stop, repeat_penalty=1 + number / 2)
                constraint = InTurn(sets, VOCABULARY) if sets and number == 1 else None
                engine.submit([*range(5, 15 + 4 * number)], params, into=outbox, constraint=constraint)
            while engine.work():
                pass
            assert_idle(engine)
        return [fold(outbox) for outbox in outboxes]

    whole = answers(ahead=False)
    assert Fetch not in begun
    stop = whole[0].token_ids[5]
    late, wanted = answers(stop, ahead=True), answers(stop, ahead=False)
    assert [answer.token_ids for answer in late] == [answer.token_ids for answer in wanted]
    assert late[0].finish_reason == "stop"
    assert begun.count(Fetch) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("sets", [None, [range(5, 50), range(40, 90)]], ids=["no constraint", "a constraint"])
def test_steps_that_begin_ahead_have_the_tokens_of_steps_that_wait(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, sets: Any
) -> None:
    compare_with_waiting(lambda: CudaOps(open_device(checked=False)), tiny_path, monkeypatch, sets=sets)
