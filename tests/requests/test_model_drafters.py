"""Drafters that are part of the model or read it: answers stay the same, and what is not there is a sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm import Engine, EngineError
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.config import EngineConfig
from polarlm.engine.loading.need import need
from polarlm.engine.model.batch import StepBatch
from polarlm.engine.model.layers.mtp import MtpRow
from polarlm.engine.outputs import Chunk, fold
from polarlm.engine.requests.drafters.mtp import MtpDrafter
from polarlm.engine.sampling.sample import greedy
from tests.bare import forward
from tests.cuda.several_devices import LimitedDevice
from tests.eagle3 import DRAFTED_IDS, with_head
from tests.mtp import Beside, make_mtp
from tests.pairs import each, mostly_slow
from tests.requests.drafters import (
    ANEW,
    BACKENDS,
    OPS,
    PARAMS,
    SETTINGS,
    Known,
    Unpaced,
    drafting,
    plain,
    prompts,
    summary,
)
from tests.requests.test_assistants import ASSISTANTS, NAMES, with_assistant
from tests.tiny import VOCABULARY, assert_idle, forget, load_tiny, make_model


@dataclass(frozen=True)
class Kind:
    """make: fills a folder with a model of the name of a fixture, and with what drafts. models: their cache types."""

    make: Callable[[Path, str], object]
    models: Mapping[str, str]

    @property
    def plainest(self) -> str:
        return next(iter(self.models))


KINDS = {
    "mtp": Kind(
        make_mtp,
        {
            "glm4_moe_qk_norm": "polarquant",
            "qwen3_next_shared_keys": "ring4",
            "qwen3_5_moe_with_images": "f16",
            "nemotron_h_latent": "balanced",
            "deepseek_v3_yarn": "balanced",
        },
    ),
    "eagle3": Kind(
        lambda folder, fixture: with_head(folder, fixture, ids=DRAFTED_IDS),
        {
            "llama_gqa_llama3_tied": "f16",
            "qwen3_5_moe_with_images": "balanced",
            "gemma3_tied": "polarquant",
            "olmo2_post_norms": "ring4",
            "glm4_moe_lite": "balanced",
        },
    ),
    "assistant": Kind(with_assistant, dict.fromkeys(NAMES, "balanced")),
}


def loaded(
    folder: Path, kind: str, fixture: str | None = None, backend: Callable[[], Any] = OPS["default"], **more: Any
) -> Engine:
    """An engine whose requests can be drafted for. fixture: None for the plainest model."""
    KINDS[kind].make(folder, fixture or KINDS[kind].plainest)
    return load_tiny(folder, ops=backend(), **SETTINGS | {"spec_type": kind} | more)


MODELS = [(name, fixture) for name, kind in KINDS.items() for fixture in kind.models]


@mostly_slow("of, temperature, ops", product(MODELS, [0, 1.5], OPS), each(MODELS, [0, 1.5, 1.5, 0], OPS), ids=str)
def test_answers_are_those_of_steps_of_one_token(
    tmp_path: Path, of: tuple[str, str], temperature: float, ops: str
) -> None:
    """Of several requests at once, with drafts that are accepted and others; of models of any form."""
    kind, fixture = of
    params, rng = replace(PARAMS, temperature=temperature, seed=3, max_tokens=28), np.random.default_rng(0)
    with loaded(tmp_path, kind, fixture, OPS[ops], cache_type=KINDS[kind].models[fixture]) as engine:
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


@BACKENDS
@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_its_keys_and_values_are_of_the_states_of_the_model(
    tmp_path: Path, kind: str, backend: Callable[[], Any]
) -> None:
    """Whatever has been drafted or rejected, and however many rows a step has had, beside another sequence's; and a
    prompt's in chunks are those of its steps."""
    ids = prompts(1)[0][:30]
    with loaded(tmp_path, kind, backend=backend, cache_type="f16") as engine:
        model, store, found = engine._model, engine._store, []
        group = store.group_of(model.config.depth)
        for begun, counts in ((16, [1] * 11), (16, [4, 1, 7, 3]), (1, [1] * 28), (27, [])):
            other, kv = store.new_sequence(), store.new_sequence()
            span = store.open(kv, begun)
            forward(model, [span], ids[:begun], outputs=1)
            store.commit(span)
            for count in counts:
                start = kv.length
                MtpDrafter(model.mtp, VOCABULARY, lambda kv=kv: kv).draft(ids[: start + 1], count)
                spans = [store.open_step(other, 1), store.open_step(kv, count)]
                rows = [*ids[start : start + count - 1], 9] if count > 1 else ids[start : start + 1]
                model.step(StepBatch(spans, [7, *rows], [greedy(VOCABULARY)] * (1 + count))).wait()
                store.commit_steps(spans, [1, max(1, count - 1)])
            assert kv.length >= 27
            arrays = store.groups[group].read_full(kv.tables[group].current, 11)
            found.append([arrays[model.config.depth, side].astype(np.float32) for side in "kv"])
            for one in (other, kv):
                store.release(one)
        for one in found[1:]:
            np.testing.assert_allclose(found[0], one, atol=5e-3)
        assert np.abs(found[0]).max() > 0.5


@pytest.mark.parametrize(
    "backend",
    [NumpyOps, lambda: None, pytest.param(lambda: CudaOps(LimitedDevice(0)), marks=pytest.mark.slow)],
    ids=["numpy", "default", "cuda"],
)
@pytest.mark.parametrize(("kind", "cache_type"), [("eagle3", "f16"), ("assistant", "f16"), ("assistant", "balanced")])
def test_rows_of_several_sequences_are_those_of_each_alone(
    tmp_path: Path, kind: str, cache_type: str, backend: Callable[[], Any]
) -> None:
    """Of three sequences of unlike lengths, whose rows are computed together; those of an assistant, with keys and
    values in half precision, are transformers', also of prompts that continue what the prefix cache has."""
    reference = np.load(ASSISTANTS / NAMES[0] / "reference.npz")
    ids, wanted = reference["ids"].tolist(), reference["drafts"][:, 1].tolist()
    with loaded(tmp_path, kind, backend=backend, cache_type=cache_type) as engine:
        model, store, rows = engine._model, engine._store, list[MtpRow]()
        lengths = [5, 28, 42]
        for count in lengths:
            kv = store.new_sequence()
            for first, end in ((0, count // 2), (count // 2, count)):
                span = store.open(kv, end - first)
                forward(model, [span], ids[first:end], outputs=1)
                store.commit(span)
            assert kv.hidden is not None
            rows.append(MtpRow(store.open_step(kv), ids[count], kv.hidden))
        together, alone = model.mtp.draft(rows), [model.mtp.draft([row])[0] for row in rows]
        assert [token for token, _ in together] == [token for token, _ in alone]
        for (_, one), (_, other) in zip(together, alone, strict=True):
            np.testing.assert_allclose(one, other, atol=5e-3)
        assert len({token for token, _ in alone}) > 1
        if (kind, cache_type) == ("assistant", "f16"):
            assert [token for token, _ in alone] == [wanted[count - 1] for count in lengths]
        for row in rows:
            store.abort(row.span)


@pytest.mark.parametrize("kind", KINDS)
def test_it_takes_memory_only_if_asked_for(tmp_path: Path, kind: str) -> None:
    """An assistant of weights alone: its layers have no keys and values."""
    KINDS[kind].make(tmp_path, KINDS[kind].plainest)
    sizes = []
    for spec_type in ("none", kind):
        with load_tiny(tmp_path, **SETTINGS | {"spec_type": spec_type, "cache_type": "f16", "device": "cpu"}) as engine:
            assert f"{engine.model.config.depth} layers)" in engine.fit_line()
            plan, weights = engine._parts.plan, engine._parts.model.weights.bytes
            needed = need(EngineConfig(weights=str(tmp_path), ctx_size=200, spec_type=spec_type, device="cpu")).bytes
            sizes.append((plan.bytes, weights, needed))
    (cache, *others), (cache_too, *others_too) = sizes
    assert (cache == cache_too) == (kind == "assistant")
    assert cache <= cache_too
    assert all(one < other for one, other in zip(others, others_too, strict=True))


LACKING = [
    ("llama_gqa_linear", "mtp", r"has no layer for spec_type=mtp; choose another spec_type"),
    ("qwen3_5_tied", "mtp", r"has no layer for spec_type=mtp; choose another spec_type"),
    ("llama_gqa_linear", "eagle3", r"no EAGLE-3 head beside .*; give one with model_draft"),
    ("gemma4_shared_kv", "assistant", r"no assistant of Gemma 4 beside .*; give one with model_draft"),
    ("llama_gqa_linear", "draft-simple", r"there is no draft model; give one with model_draft"),
]


@pytest.mark.parametrize(("fixture", "kind", "says"), LACKING)
def test_what_is_not_there_is_told_in_a_sentence(tmp_path: Path, fixture: str, kind: str, says: str) -> None:
    with pytest.raises(EngineError, match=says):
        load_tiny(make_model(tmp_path, fixture), **SETTINGS | {"spec_type": kind})


@pytest.mark.parametrize("loaded_for", [None, "eagle3", "assistant"])
def test_a_request_for_what_is_not_loaded_is_told_in_a_sentence(tmp_path: Path, loaded_for: str | None) -> None:
    says = {kind: f"load the engine with spec_type={kind}" for kind in ("mtp", "eagle3")}
    says |= {"draft-simple": "needs a draft model"}
    says.pop(loaded_for or "", None)
    engine = loaded(tmp_path, loaded_for) if loaded_for else load_tiny(make_model(tmp_path), **SETTINGS)
    with engine:
        for kind, sentence in says.items():
            with pytest.raises(EngineError, match=sentence):
                engine.generate([5, 6], replace(PARAMS, spec_type=kind))
