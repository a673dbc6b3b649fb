"""A second model that drafts: answers are the same as from the first model alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm import Engine, EngineError
from polarlm.engine import EngineConfig
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.loading.placement.request import PlacementRequest, Sizes, companion_bytes
from polarlm.engine.model.batch import StepBatch
from polarlm.engine.outputs import Chunk, fold
from polarlm.engine.requests.drafters.draft_model import ModelDrafter
from tests.random_model import random_model
from tests.requests.drafters import (
    ANEW,
    PARAMS,
    SETTINGS,
    Unpaced,
    drafting,
    first_difference,
    margin,
    plain,
    prompts,
    summary,
)
from tests.tiny import (
    VOCABULARY,
    assert_idle,
    blocks_left,
    by_count,
    forget,
    load_tiny,
    make_model,
    preemptions,
)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same vocabulary with other weights."""
    return make_model(tmp_path_factory.mktemp("other"), "llama_mha")


def idle(engine: Engine) -> bool:
    """Whether no request runs, and no block of either store is in use."""
    assert_idle(engine)
    groups = engine._parts.draft.model.store.groups
    return all(group.quantized.free == group.quantized.size and group.full.free == group.full.size for group in groups)


def unpaced(engine: Engine) -> list[Unpaced]:
    """Let later requests draft at every step, and return their drafts."""
    made: list[Unpaced] = []
    draft = engine._parts.draft.model
    drafting(engine, lambda ids: made.append(Unpaced(ModelDrafter(draft, VOCABULARY), lambda: 7)) or made[-1])
    return made


def test_requests_share_the_draft_model_and_are_preempted(
    tiny_path: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load_tiny(tiny_path, model_draft=str(other), cache_type="f16", **SETTINGS) as engine:
        asked = prompts(4, seed=3)
        wanted = [plain(engine, prompt) for prompt in asked]
        by_count(engine, monkeypatch)
        preempted = preemptions(engine, monkeypatch)
        made = unpaced(engine)
        trays: list[list[Chunk | Exception]] = [[] for _ in asked]
        forget(engine)
        with blocks_left(engine, 6):
            for prompt, tray in zip(asked, trays, strict=True):
                engine.submit(prompt, PARAMS, ANEW, into=tray)
            ticket = engine.submit([5, 6, 7], PARAMS, ANEW, into=[])
            for _ in range(12):
                engine.work()
            ticket.cancel()
            while engine.work():
                pass
        assert any(preempted)
        for prompt, tray, answer in zip(asked, trays, wanted, strict=True):
            place = first_difference(fold(tray).token_ids, answer.token_ids)
            assert place is None or margin(engine, prompt, PARAMS, place) < 0.02
        assert sum(drafts.drafted for drafts in made) > 50
        assert idle(engine)


def test_requests_draft_in_the_same_steps(tiny_path: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of the draft model has rows of all requests that draft; one that fails is computed anew for
    each request, and fails those that fail alone."""
    with load_tiny(tiny_path, model_draft=str(other), cache_type="f16", **SETTINGS) as engine:
        unpaced(engine)
        model, asked = engine._parts.draft.model, prompts(4)
        wanted = [plain(engine, prompt) for prompt in asked]
        step, rows, bad = model.step, list[int](), list[int]()

        def counted(batch: StepBatch) -> Any:
            rows.append(len(batch.spans))
            if bad and (len(batch.spans) > 1 or batch.spans[0].sequence is sequences[0]):
                raise MemoryError
            return step(batch)

        monkeypatch.setattr(model, "step", counted)
        for fails in (False, True):
            made, trays = unpaced(engine), [list[Chunk | Exception]() for _ in asked]
            forget(engine)
            for prompt, tray in zip(asked, trays, strict=True):
                engine.submit(prompt, PARAMS, ANEW, into=tray)
            while engine.work():
                if fails and not bad and all(one._given._kv is not None for one in made) and len(made) == 4:
                    sequences = [one._given._kv for one in made]
                    bad.append(1)
            failed = [isinstance(tray[-1], Exception) for tray in trays]
            assert failed == [fails, False, False, False]
            for prompt, tray, answer, is_bad in zip(asked, trays, wanted, failed, strict=True):
                place = None if is_bad else first_difference(fold(tray).token_ids, answer.token_ids)
                assert place is None or margin(engine, prompt, PARAMS, place) < 0.02
            if not fails:
                assert sum(rows) > 2 * len(rows)
        assert idle(engine)


def test_a_draft_store_without_room_drafts_nothing(tiny_path: Path, other: Path) -> None:
    with load_tiny(tiny_path, model_draft=str(other), cache_type="f16", **SETTINGS) as engine:
        wanted = plain(engine, prompts(1)[0])
        made = unpaced(engine)
        slots = engine._parts.draft.model.store.groups[0].full
        total_bytes = slots.allocate(slots.free)
        assert summary(engine.generate(prompts(1)[0], PARAMS, ANEW)) == summary(wanted)
        assert made[0].drafted == 0
        for slot in total_bytes:
            slots.release(slot)


def test_the_model_drafts_unless_a_request_says_otherwise(tiny_path: Path, other: Path) -> None:
    with Engine.load(tiny_path, device="cpu", model_draft=str(other), **SETTINGS) as engine:
        usage = engine.generate([5, 6, 7], PARAMS).usage
        assert usage.drafted_tokens > 0
        assert engine.generate([5, 6, 7], replace(PARAMS, spec_type="none")).usage.drafted_tokens == 0
        assert engine.generate([5, 6, 7] * 4, replace(PARAMS, spec_type="ngram-simple")).usage.completion_tokens == 40


def test_what_cannot_be_is_told_in_a_sentence(tiny_path: Path, tmp_path: Path) -> None:
    strange = random_model(tmp_path)
    with pytest.raises(
        EngineError, match=r"its vocabulary is not that of .*; choose a smaller model of the same family"
    ):
        Engine.load(tiny_path, device="cpu", model_draft=str(strange), **SETTINGS)
    with pytest.raises(EngineError, match="nowhere"):
        Engine.load(tiny_path, device="cpu", model_draft=str(tmp_path / "nowhere"), **SETTINGS)


def test_a_draft_model_has_no_snapshots(tiny_path: Path, tmp_path: Path) -> None:
    """Nothing would find them."""
    hybrid = make_model(tmp_path, "qwen3_5_tied")
    with load_tiny(tiny_path, model_draft=str(hybrid), cache_type="f16", **SETTINGS) as engine:
        wanted = plain(engine, prompts(1)[0])
        made = unpaced(engine)
        assert engine.generate(prompts(1)[0], PARAMS, ANEW).token_ids == wanted.token_ids
        assert made[0].drafted
        assert engine._parts.draft.plan.snapshot_bytes == 0


def test_the_plan_leaves_room_for_the_draft_model(tiny_path: Path, other: Path) -> None:
    config = EngineConfig(weights=str(tiny_path), model_draft=str(other), cache_type="f16", block_size=16)
    ops = NumpyOps()
    with Engine.load(tiny_path, device="cpu", **SETTINGS) as engine:
        model = engine.model.config
    wanted, more = PlacementRequest(config, model, Sizes(0)), companion_bytes(config, ops, model, tiny_path)
    shape = wanted.shape(ops)
    assert more(1000) > more(0) > 100_000  # its weights
    alone = wanted.plan(ops, shape, 1 << 40)
    room = wanted.total_bytes(ops, alone) + more(alone.tokens) - 50_000
    assert wanted.plan(ops, shape, room).tokens == alone.tokens
    assert replace(wanted, other_bytes=more).plan(ops, shape, room).tokens < alone.tokens


def test_forgotten_tokens_leave_no_trace(tiny_path: Path) -> None:
    """A sequence goes on from the middle of its current block as one that never had the tokens."""
    rng = np.random.default_rng(0)
    ids = rng.integers(5, VOCABULARY, 70).tolist()
    with load_tiny(tiny_path, ops=NumpyOps(), cache_type="f16", **SETTINGS) as engine:
        drafter = ModelDrafter(engine._model, VOCABULARY)
        for end in range(1, 60):
            given = drafter.draft(ids[:end], 1 + end % 3)  # what follows is hardly ever what was drafted
            fresh = ModelDrafter(engine._model, VOCABULARY)
            assert list(given) == list(fresh.draft(ids[:end], 1 + end % 3))
            fresh.release()
        drafter.release()
        assert_idle(engine)
