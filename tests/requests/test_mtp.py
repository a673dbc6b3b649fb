"""A layer of the model itself that drafts: what it drafts, and that answers stay the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from polarlm import Engine, EngineError, SamplingParams
from polarlm.bench.shapes import qwen3_5
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.config import EngineConfig
from polarlm.engine.loading.need import need
from polarlm.engine.outputs import Chunk, fold
from polarlm.engine.requests.drafters.mtp import MtpDrafter
from polarlm.engine.requests.drafts import StepSeconds
from polarlm.engine.sampling.sample import greedy
from scripts.make_random_model import write
from tests.conftest import TRAINED_HYBRID
from tests.mtp import Beside, make_mtp
from tests.pairs import each, mostly_slow
from tests.random_model import tokenizer_file
from tests.requests.drafters import ANEW, Known, Unpaced, drafting, summary
from tests.requests.test_drafts import plain, prompts
from tests.tiny import VOCABULARY, assert_idle, forget, load_tiny, make_model

SETTINGS: dict[str, Any] = {"block_size": 16, "ctx_size": 200, "parallel": 4, "calibration": False, "spec_type": "mtp"}
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
OPS: dict[str, Callable[[], Any]] = {"numpy": NumpyOps, "default": lambda: None}
BACKENDS = pytest.mark.parametrize("backend", OPS.values(), ids=OPS)


def guesses(engine: Engine, ids: list[int], begun: int, most: int, vocabulary: int | None = None) -> list[int]:
    """What is drafted after `ids`, with a prompt of the first `begun`, and a step for each but the newest one."""
    model, store = engine._model, engine._store
    kv = store.new_sequence()
    span = store.open(kv, begun)
    model.forward([span], ids[:begun], outputs=1)
    store.commit(span)
    for at in range(begun, len(ids) - 1):
        span = store.open_step(kv)
        model.step([span], [ids[at]], [greedy(model.config.vocab_size)])
        store.commit(span)
    drafted = MtpDrafter(model.mtp, vocabulary or model.config.vocab_size, lambda: kv).draft(
        ids, min(most, store.rows_of_block(kv))
    )
    store.release(kv)
    return [*drafted]


@pytest.mark.parametrize(("backend", "every"), [(NumpyOps, 30), (lambda: None, 3)], ids=["numpy", "default"])
def test_it_drafts_what_transformers_drafts(backend: Callable[[], Any], every: int) -> None:
    """At every so many places: NumPy takes ten times as long."""
    reference = np.load(TRAINED_HYBRID / "reference.npz")
    ids, places = reference["ids"].tolist(), reference["drafts"][::every].tolist()
    with load_tiny(TRAINED_HYBRID, ops=backend(), **SETTINGS, cache_type="f16") as engine:
        for place, *wanted in places:
            found = guesses(engine, ids[: place + 1], max(1, place - place % 4), len(wanted))
            assert found == wanted[: len(found)] != []
    assert len(places) > 60 // every


@pytest.mark.parametrize(("cache_type", "temperature"), [("f16", 0), ("balanced", 1), ("by-age", 0)])
def test_a_trained_layer_is_right_and_changes_no_answer(
    cache_type: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests at once, each longer than two blocks; and the next turn, whose first rows lack the state before."""
    monkeypatch.setattr(StepSeconds, "record", lambda *step: None)  # drafts do not pause on a machine that is busy
    ids = np.load(TRAINED_HYBRID / "reference.npz")["ids"].tolist()
    more = {"ctx_size": 512, "cache_type": cache_type, "spec_type": "mtp"}
    params = replace(PARAMS, max_tokens=60, temperature=temperature, seed=1, draft_max=1)
    with Engine.load(TRAINED_HYBRID, device="cpu", parallel=3, **more) as engine:
        asked = [ids[:70], ids[:130], ids[100:120]]
        asked += [[*prompt, *range(400, 410)] for prompt in asked]
        answers: list[list[tuple[object, ...]]] = []
        drafted = accepted = 0
        for kind in ("none", "mtp"):
            forget(engine)
            answers.append([])
            for turn in (asked[:3], asked[3:]):
                streams = [engine.stream(prompt, replace(params, spec_type=kind)) for prompt in turn]
                begun = [[next(stream)] for stream in streams]
                done = [fold([*chunks, *stream]) for chunks, stream in zip(begun, streams, strict=True)]
                answers[-1] += map(summary, done)
                drafted += sum(one.usage.drafted_tokens for one in done)
                accepted += sum(one.usage.accepted_tokens for one in done)
        assert answers[0] == answers[1]
        assert accepted > 0.4 * drafted > 4
        assert_idle(engine)


OF_TYPES = [
    ("qwen3_next_shared_keys", "ring4"),
    ("qwen3_5_moe_with_images", "f16"),
    ("glm4_moe_qk_norm", "polarquant"),
    ("nemotron_h_latent", "balanced"),
    ("deepseek_v3_yarn", "balanced"),
]


def check_answers(engine: Engine, temperature: float) -> None:
    """Answers to several requests at once are those of steps of one token, beside drafts that are accepted."""
    params, rng = replace(PARAMS, temperature=temperature, seed=3, max_tokens=28), np.random.default_rng(0)
    asked = prompts(4)
    wanted = [plain(engine, prompt, params) for prompt in asked]
    known = [Beside(engine, Known([*p, *w.token_ids], 0.8, VOCABULARY)) for p, w in zip(asked, wanted, strict=True)]
    waiting = iter(known)
    drafting(engine, lambda ids: Unpaced(next(waiting), lambda: int(rng.integers(1, 8))))
    forget(engine)
    trays: list[list[Chunk | Exception]] = [[] for _ in asked]
    for prompt, tray in zip(asked, trays, strict=True):
        engine.submit(prompt, params, ANEW, into=tray)
    while engine.work():
        pass
    assert [summary(fold(tray)) for tray in trays] == [summary(one) for one in wanted]
    assert all(one.drafted > 10 for one in known)
    assert_idle(engine)


@mostly_slow("of, temperature, ops", product(OF_TYPES, [0, 1.5], OPS), each(OF_TYPES, [0, 1.5, 1.5, 0], OPS), ids=str)
def test_answers_are_those_of_steps_of_one_token(
    tmp_path: Path, of: tuple[str, str], temperature: float, ops: str
) -> None:
    """Of hybrids, and of attention and experts alone, with drafts that are accepted and others."""
    model, cache_type = of
    with load_tiny(make_mtp(tmp_path, model), ops=OPS[ops](), **SETTINGS, cache_type=cache_type) as engine:
        check_answers(engine, temperature)


@BACKENDS
def test_its_keys_and_values_are_of_the_states_of_the_model(tmp_path: Path, backend: Callable[[], Any]) -> None:
    """Whatever has been drafted or rejected, and however many rows a step has had, beside another sequence's."""
    ids = prompts(1)[0][:30]
    with load_tiny(make_mtp(tmp_path, "glm4_moe_qk_norm"), ops=backend(), **SETTINGS, cache_type="f16") as engine:
        model, store, found = engine._model, engine._store, []
        for counts in ([1] * 11, [4, 1, 7, 3]):
            other, kv = store.new_sequence(), store.new_sequence()
            span = store.open(kv, 16)
            model.forward([span], ids[:16], outputs=1)
            store.commit(span)
            for count in counts:
                start = kv.length
                MtpDrafter(model.mtp, VOCABULARY, lambda kv=kv: kv).draft(ids[: start + 1], count)
                spans = [store.open_step(other, 1), store.open_step(kv, count)]
                rows = [*ids[start : start + count - 1], 9] if count > 1 else ids[start : start + 1]
                model.step(spans, [7, *rows], [greedy(VOCABULARY)] * (1 + count))
                store.commit_steps(spans, [1, max(1, count - 1)])
            assert kv.length >= 27
            arrays = store.groups[0].read_full(kv.tables[0].current, 11)
            found.append([arrays[3, side].astype(np.float32) for side in "kv"])
            for one in (other, kv):
                store.release(one)
        np.testing.assert_allclose(found[0], found[1], atol=2e-3)


@BACKENDS
def test_states_that_are_not_finite_harm_no_other_sequence_of_a_step(
    tmp_path: Path, backend: Callable[[], Any]
) -> None:
    """The row after them is another sequence's first one, whose keys and values the next row drafts with."""
    bad, file = 40, make_mtp(tmp_path, "qwen3_5_moe_with_images") / "model.safetensors"
    tensors = load_file(file)
    tensors["model.language_model.embed_tokens.weight"][bad] = np.nan
    save_file(tensors, file)
    with load_tiny(tmp_path, ops=backend(), **SETTINGS) as engine:
        model, store = engine._model, engine._store
        damaged, kv = store.new_sequence(), store.new_sequence()
        spans = [store.open_step(damaged), store.open_step(kv)]
        model.step(spans, [bad, 5], [greedy(VOCABULARY)] * 2)
        store.commit_steps(spans)
        assert len(MtpDrafter(model.mtp, VOCABULARY, lambda: kv).draft([5, 6], 3)) == 3
        assert not MtpDrafter(model.mtp, VOCABULARY, lambda: damaged).draft([bad, 6], 3)
        for one in (damaged, kv):
            store.release(one)


def test_rows_of_the_head_that_are_no_tokens_are_not_drafted(tmp_path: Path) -> None:
    """Penalties on them would fail the step: of a request beside it, too."""
    with load_tiny(make_mtp(tmp_path, "glm4_moe_qk_norm"), **SETTINGS) as engine:
        ids = prompts(1)[0][:10]
        found = guesses(engine, ids, 5, 3)
        assert guesses(engine, ids, 5, 3, found[0]) == []


def test_what_is_not_there_is_told_in_a_sentence(tiny_path: Path, tmp_path: Path) -> None:
    for path in (tiny_path, make_model(tmp_path, "qwen3_5_tied")):
        with pytest.raises(EngineError, match=r"has no layer for spec_type=mtp; choose another spec_type"):
            Engine.load(path, device="cpu", spec_type="mtp")
    with Engine.load(tiny_path, device="cpu") as engine, pytest.raises(EngineError, match="load the engine with spec_"):
        engine.generate([5, 6], replace(PARAMS, spec_type="mtp"))


def test_a_session_with_its_keys_and_values_is_not_loaded_without_it(tmp_path: Path) -> None:
    path = make_mtp(tmp_path, "qwen3_5_tied")
    for kind, other in (("mtp", "none"), ("none", "mtp")):
        with load_tiny(path, **SETTINGS | {"spec_type": kind}) as engine:
            engine.generate([5, 6, 7], PARAMS)
            engine.save_session(tmp_path / kind)
        with (
            load_tiny(path, **SETTINGS | {"spec_type": other}) as engine,
            pytest.raises(EngineError, match=r"spec_type=mtp, eagle3 or assistant: load it where it was saved"),
        ):
            engine.load_session(tmp_path / kind)


def test_files_of_llama_cpp_have_it_too_and_it_takes_memory_only_if_asked_for(tmp_path: Path) -> None:
    config = qwen3_5(4, 64, 128, 2, 1, 16).with_mtp()
    path = tmp_path / "random.gguf"
    write(path, "random", replace(config, vocab_size=262), "q8_0", tokenizer_file(tmp_path))
    names = {tensor.name for tensor in gguf.GGUFReader(path).tensors}
    parts = ("EH_PROJ", "ENORM", "HNORM", "SHARED_HEAD_NORM")
    theirs = [gguf.TENSOR_NAMES[gguf.MODEL_TENSOR[f"NEXTN_{part}"]].format(bid=4) for part in parts]
    assert {f"{name}.weight" for name in theirs} <= names
    sizes = []
    for kind in ("none", "mtp"):
        with Engine.load(path, **SETTINGS | {"spec_type": kind, "cache_type": "f16", "device": "cpu"}) as engine:
            assert engine.generate([5, 6, 7], PARAMS).usage.completion_tokens == 40
            assert "(qwen3_5, 4 layers)" in engine.fit_line()
            plan, weights = engine._parts.plan, engine._parts.model.weights.bytes
            assert (len(plan.shape.layers), len(plan.shape.kv_layers)) == ((5, 2) if kind == "mtp" else (4, 1))
            needed = need(EngineConfig(weights=str(path), ctx_size=200, spec_type=kind, device="cpu")).bytes
            sizes.append((plan.bytes, weights, needed))
    assert all(one < other for one, other in zip(*sizes, strict=True))
