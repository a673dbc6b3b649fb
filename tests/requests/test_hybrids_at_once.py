"""64 clients of a model with recurrent layers, half of whom leave: texts are as alone, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from polarlm.engine import AsyncEngine, PromptOptions, SamplingParams
from polarlm.engine.outputs import fold
from tests.hybrids import MODELS, Load, N, alone, ids_of, loading
from tests.tiny import assert_idle, preemptions

CLIENTS, ROUNDS, TOKENS = 64, 3, 2 * N + 5
MORE_MEMORY = 16 << 20  # bytes, on top of what the process has after the first round
PARAMS = SamplingParams(max_tokens=TOKENS, temperature=1, seed=1, ignore_eos=True)
# Prompts that share beginnings, of up to six blocks.
PROMPTS = [[*ids_of(number % 3 * 2 * N, seed=9), *ids_of(1 + 11 * number % 45, seed=number)] for number in range(16)]


@pytest.fixture(params=MODELS)
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Load]:
    with loading(tmp_path, request.param) as load:
        yield load


@pytest.mark.slow
def test_they_get_what_they_get_alone(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are blocks for three of eight that run at a time, and snapshots and copies for a few."""
    wanted = [alone(load, prompt, TOKENS) for prompt in PROMPTS]
    engine = load(parallel=8, ctx_size=300, kept_sequences=2, state_cache="150k")
    preempted, copies, seen = preemptions(engine, monkeypatch), [], {"whole": 0, "left": 0, "cached": 0}
    save, runner, bound = engine._runner._save, engine._runner, engine._store.plan.snapshot_bytes

    def watched(request: object) -> None:
        save(request)  # type: ignore[arg-type]
        copies.append(sum(one.saved.bytes for one in runner.requests.values() if one.saved is not None))

    monkeypatch.setattr(runner, "_save", watched)

    async def client(both: AsyncEngine, number: int) -> None:
        rng = random.Random(number)
        for _ in range(ROUNDS):
            job, leaves_after = rng.randrange(len(PROMPTS)), rng.randrange(TOKENS) if number % 2 else None
            options = PromptOptions(cache_prompt=rng.random() < 0.8, cache_salt=rng.choice(["", "", "mine"]))
            chunks, count = [], 0
            async for chunk in both.stream(PROMPTS[job], PARAMS, options):
                chunks.append(chunk)
                count += len(chunk.token_ids)
                if leaves_after is not None and count >= leaves_after:
                    break
            found = tuple(token for chunk in chunks for token in chunk.token_ids)
            assert found == wanted[job][: len(found)]
            if chunks[-1].usage is None:
                seen["left"] += 1
            else:
                assert fold(chunks).finish_reason == "length"
                assert found == wanted[job]
                seen["whole"] += 1
                seen["cached"] += chunks[-1].usage.cached_tokens

    held: list[int] = []

    async def all_clients() -> None:
        async with AsyncEngine(engine) as both:
            while len(held) < 2 or (held[-1] - held[-2] >= MORE_MEMORY and len(held) < 5):  # others may take some
                await asyncio.gather(*(client(both, number) for number in range(CLIENTS)))
                held.append(psutil.Process().memory_info().rss)
            await asyncio.to_thread(assert_idle, engine)
            assert held[-1] - held[-2] < MORE_MEMORY

    asyncio.run(all_clients())
    assert seen["whole"] + seen["left"] == len(held) * CLIENTS * ROUNDS
    assert seen["left"] > 0.4 * len(held) * CLIENTS * ROUNDS
    assert seen["cached"]
    assert any(preempted)
    assert 0 < max(copies) <= bound
