"""Preempted requests whose models have recurrent layers: what they knew waits in the computer's memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Engine, PromptOptions, SamplingParams
from polarlm.engine.outputs import Completion, fold
from polarlm.engine.state.recurrent.delta import DeltaState
from tests.hybrids import MODELS, Load, N, alone, ids_of, loading
from tests.tiny import assert_idle, blocks_left, by_count, preempt, preemptions

TOKENS = 3 * N
PARAMS = SamplingParams(max_tokens=TOKENS, temperature=1, seed=1, ignore_eos=True)
JOBS = [ids_of(5 * N + 3 * number, seed=number) for number in range(4)]
ROOM = {"parallel": 4, "state_cache": "10M"}


@pytest.fixture(params=MODELS)
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Load]:
    with loading(tmp_path, request.param) as load:
        yield load


def prompts_computed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets how many tokens every later part of a prompt has, prompts that are computed again included."""
    seen: list[int] = []
    open_batch = engine._store.open_batch

    def counted(prompts: Any, **more: Any) -> Any:
        seen.extend(count for _, count in prompts)
        return open_batch(prompts, **more)

    monkeypatch.setattr(engine._store, "open_batch", counted)
    return seen


def forget_slots(engine: Engine) -> None:
    """Overwrite all slots of recurrent layers, which no request holds, so that the prefix cache finds none of them."""
    for allocator in (group.full for group in engine._store.groups if group.is_sparse):
        for slot in allocator.allocate(allocator.free):
            allocator.release(slot)


def all_at_once(engine: Engine) -> list[Completion]:
    """Prompts before answers, so that no prompt is preempted."""
    streams = [engine.stream(ids, PARAMS) for ids in JOBS]
    begun = [[next(stream)] for stream in streams]
    return [fold([*chunks, *stream]) for chunks, stream in zip(begun, streams, strict=True)]


@pytest.mark.parametrize(
    "settings",
    [
        {"state_type": "f32"},
        {"state_type": "8bit", "cache_type": "ring4", "calibration": False},
    ],
    ids=["exact", "8 bits, K/V as codes"],
)
def test_a_preempted_request_computes_nothing_again(
    load: Load, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """It goes on with the exact state, whatever snapshots are kept as, though others have taken its last blocks."""
    wanted = [alone(lambda: load(**settings), ids, TOKENS) for ids in JOBS]
    engine = load(**settings, **ROOM)
    by_count(engine, monkeypatch)
    preempted, computed = preemptions(engine, monkeypatch), prompts_computed(engine, monkeypatch)
    (attention,) = (index for index, group in enumerate(engine._store.groups) if not group.is_sparse)
    with blocks_left(engine, 18, attention):  # all answers together need 32
        found = all_at_once(engine)
    assert [one.token_ids for one in found] == wanted
    assert len([one for one in preempted if one is not None]) > 1
    assert sum(computed) == sum(map(len, JOBS))
    assert_idle(engine)


@pytest.mark.slow
def test_at_any_place_of_a_block(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also right after its prompt, whose snapshots it still holds, and between two blocks."""
    ids, state_type = JOBS[1], "8bit"
    wanted = alone(lambda: load(state_type=state_type), ids, TOKENS)
    engine = load(state_type=state_type, **ROOM)
    computed = prompts_computed(engine, monkeypatch)
    for begun in range(1, N + 2):
        computed.clear()
        stream = engine.stream(ids, PARAMS, PromptOptions(cache_prompt=False))
        chunks = [next(stream) for _ in range(begun)]
        request = preempt(engine)
        assert request.saved is not None
        for state in (group for group in engine._store.groups if isinstance(group, DeltaState)):
            for array in (array for slots in state._slots.values() for array in slots):
                array[...] = np.nan  # as if others had taken all slots
        chunks += stream
        assert request.saved is None
        assert fold(chunks).token_ids == wanted
        assert sum(computed) == len(ids)
    assert_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize("load", MODELS[:2], indirect=True)  # where decays are small beside matrices
def test_copies_take_no_more_memory_than_snapshots(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have no room are computed again."""
    wanted = [alone(load, ids, TOKENS) for ids in JOBS]
    probe = load(**ROOM)
    stream = probe.stream(JOBS[0], PARAMS)
    next(stream)
    saved = preempt(probe).saved
    stream.close()
    for size in (saved.bytes // 2, 3 * saved.bytes):
        engine = load(parallel=4, state_cache=str(size))
        by_count(engine, monkeypatch)
        preempted, computed = preemptions(engine, monkeypatch), prompts_computed(engine, monkeypatch)
        release, held = engine._runner._release, []

        def note_saved(request: Any, engine: Engine = engine, release: Any = release, held: list[int] = held) -> None:
            held.append(sum(one.saved.bytes for one in engine._runner.requests.values() if one.saved is not None))
            release(request)

        monkeypatch.setattr(engine._runner, "_release", note_saved)
        (attention,) = (index for index, group in enumerate(engine._store.groups) if not group.is_sparse)
        with blocks_left(engine, 18, attention):
            found = all_at_once(engine)
        assert [one.token_ids for one in found] == wanted
        assert any(preempted)
        assert max(held) <= engine._store.plan.snapshot_bytes
        assert (max(held) > 0) == (size > saved.bytes)
        assert sum(computed) > sum(map(len, JOBS))  # even of three copies, not all have room
        assert_idle(engine)


def test_an_answer_that_is_computed_again_takes_no_snapshot_from_others(load: Load) -> None:
    engine = load(state_cache="1k")
    each = engine._store.plan.shape.snapshot_bytes(tuple(int(group.is_sparse) for group in engine._store.groups))
    engine = load(state_cache=str(3 * each))
    other = ids_of(5 * N + 3, seed=9)
    engine.generate(other, PARAMS)
    stream = engine.stream(JOBS[0], PARAMS)
    chunks = [next(stream) for _ in range(TOKENS - 2)]
    assert preempt(engine).saved is None
    forget_slots(engine)
    assert fold([*chunks, *stream]).token_ids == alone(load, JOBS[0], TOKENS)
    assert engine.generate([*other[: 5 * N], 7, 8], PARAMS).usage.cached_tokens == 5 * N
