"""The engine's prefix cache: stored tokens are not computed again, answers do not change, no block leaks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from polarlm.engine import Completion, Engine, EngineError, SamplingParams
from polarlm.engine.backends.kv import KVLocation
from polarlm.engine.outputs import fold
from tests.tiny import GREEDY, assert_idle, held, ids, make_model

N = 16


def load(path: Path, type: str = "f16", **more) -> Engine:
    return Engine.load(path, device="cpu", cache_type_k=type, cache_type_v=type, block_size=N, **more)


@pytest.fixture
def engine(tiny_path: Path) -> Iterator[Engine]:
    with load(tiny_path) as engine:
        yield engine
        assert_idle(engine)


@pytest.fixture(scope="module")
def fresh(tiny_path: Path) -> Iterator[Engine]:
    """An engine without a prefix cache."""
    with load(tiny_path, kept_sequences=0) as engine:
        yield engine


def assert_agrees(answer: Sequence[int], alone: Sequence[int], prompt: Sequence[int], fresh: Engine) -> None:
    """Assert that the answers are equal up to the first step at which the two best tokens are nearly equal."""
    assert len(answer) == len(alone)
    for at, (a, b) in enumerate(zip(answer, alone, strict=True)):
        if a != b:
            best = np.sort(fresh.score([*prompt, *alone[:at]], logits=True).logits[-1])
            assert best[-1] - best[-2] < 0.02
            return


def assert_as_alone(answer: Completion, prompt: Sequence[int], fresh: Engine) -> None:
    assert_agrees(answer.token_ids, fresh.generate(prompt, GREEDY).token_ids, prompt, fresh)


@pytest.mark.parametrize("length", [3, N, N + 1, 4 * N, 4 * N + 3])
def test_the_same_prompt_again_prefills_a_block_at_most(engine: Engine, fresh: Engine, length: int) -> None:
    prompt = ids(length, length)
    first = engine.generate(prompt, GREEDY)
    again = engine.generate(prompt, GREEDY)
    assert length - again.usage.cached_tokens <= N
    assert_as_alone(first, prompt, fresh)
    assert_as_alone(again, prompt, fresh)


def test_running_requests_share_the_blocks_of_a_system_prompt(engine: Engine, fresh: Engine) -> None:
    system = ids(1, 5 * N + 3)
    prompts = [[*system, *ids(seed, 9)] for seed in (2, 3, 4)]
    streams = [engine.stream(prompt, GREEDY) for prompt in prompts]
    for stream in streams:
        next(stream)
    quantized, _ = held(engine)[0]
    assert quantized <= 4 + 2 * len(prompts)  # four blocks for all, and one or two for each
    for stream, prompt in zip(streams, prompts, strict=True):
        answer = fold(stream)
        assert answer.usage.cached_tokens == (0 if prompt is prompts[0] else 5 * N)
        alone = fresh.generate(prompt, GREEDY).token_ids[-len(answer.token_ids) :]
        assert_agrees(answer.token_ids, alone, prompt, fresh)


def test_an_engine_without_kept_sequences_hits_nothing(fresh: Engine) -> None:
    fresh.generate(ids(1, 20), GREEDY)
    assert held(fresh) == [(0, 0)]
    assert fresh.generate(ids(1, 20), SamplingParams(max_tokens=0)).usage.cached_tokens == 0


def test_cache_stats_are_those_of_the_newest_sequence(tiny: Engine) -> None:
    tiny.generate(ids(1, 60), SamplingParams(max_tokens=0))
    tiny.generate(ids(2, 20), SamplingParams(max_tokens=0))
    stats = tiny.cache_stats()
    assert (stats.tokens, stats.context) == (20, 256)
    assert stats.f16_bytes == 32 * 2 * 2 * 2 * 8 * 2  # tokens of two blocks, K and V, layers, heads, channels, bytes


@pytest.mark.parametrize("place", ["sink", "quantized", "current"])
def test_damaged_sequences_are_not_found_again(tiny: Engine, place: str) -> None:
    """Neither the damaged block, nor the blocks after it, nor a current block that was copied in part."""
    past = ids(1, 44)
    tiny.generate(past, SamplingParams(max_tokens=0))
    kv = tiny._prefixes.match_prefix(past)
    cache, (table,) = tiny._store.cache(1), kv.tables
    if place == "quantized":
        cache.mean["mean"][:, table.quantized] = np.nan
    else:
        slot = table.sink if place == "sink" else table.current
        cache.full(KVLocation(None, slot))[1][:] = np.nan
    tiny._prefixes.release(kv, past)
    prompt = [*past[:42], 7]
    with pytest.raises(EngineError, match="not finite"):
        tiny.generate(prompt, GREEDY)
    assert tiny.cache_stats().tokens == len(past)  # the newest undamaged one
    assert tiny.generate(past[:N], GREEDY).usage.cached_tokens == 0  # stores the first block again
    answer = tiny.generate(prompt, GREEDY)
    assert answer.usage.cached_tokens == N
    assert tiny.generate([*prompt, *answer.token_ids], GREEDY).usage.cached_tokens > 40


def test_blocks_of_other_settings_have_other_hashes(tiny_path: Path, tmp_path: Path) -> None:
    """The hash covers model, codecs, conditioning and calibration, and no settings that do not change codes."""
    others = [
        {"type": "ring4"},
        {"type": "polarquant", "cache_type_v": "f16"},
        {"type": "polarquant", "key_conditioning": False},
        {"type": "polarquant", "calibration": True},
        {"type": "polarquant", "path": make_model(tmp_path, "llama_mha")},
    ]

    def identity(path: Path = tiny_path, type: str = "polarquant", **more) -> str:
        with Engine.load(
            path, **{"cache_type_k": type, "cache_type_v": type, "device": "cpu", "calibration": False, **more}
        ) as engine:
            return json.dumps(engine._identity)

    assert len({identity(), *(identity(**other) for other in others)}) == 1 + len(others)
    assert identity(ctx_size=64, parallel=2) == identity()
