"""A layer of the model itself that drafts: what it drafts, and that answers stay the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from polarlm import Engine, EngineError
from polarlm.bench.shapes import qwen3_5
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.model.batch import StepBatch
from polarlm.engine.outputs import fold
from polarlm.engine.requests.drafters.mtp import MtpDrafter
from polarlm.engine.requests.drafts import StepSeconds
from polarlm.engine.sampling.sample import greedy
from scripts.make_random_model import write
from tests.conftest import TRAINED_HYBRID
from tests.mtp import make_mtp
from tests.random_model import tokenizer_file
from tests.requests.drafters import BACKENDS, PARAMS, guesses, prompts, summary
from tests.requests.drafters import SETTINGS as BASE
from tests.tiny import VOCABULARY, assert_idle, forget, load_tiny

SETTINGS = BASE | {"spec_type": "mtp"}


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


@pytest.mark.parametrize(("cache_type", "temperature"), [("f16", 0), ("balanced", 1)])
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
        model.step(StepBatch(spans, [bad, 5], [greedy(VOCABULARY)] * 2)).wait()
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


def test_files_of_llama_cpp_have_it_too(tmp_path: Path) -> None:
    config = qwen3_5(4, 64, 128, 2, 1, 16).with_mtp()
    path = tmp_path / "random.gguf"
    write(path, "random", replace(config, vocab_size=262), "q8_0", tokenizer_file(tmp_path))
    names = {tensor.name for tensor in gguf.GGUFReader(path).tensors}
    parts = ("EH_PROJ", "ENORM", "HNORM", "SHARED_HEAD_NORM")
    theirs = [gguf.TENSOR_NAMES[gguf.MODEL_TENSOR[f"NEXTN_{part}"]].format(bid=4) for part in parts]
    assert {f"{name}.weight" for name in theirs} <= names
    with Engine.load(path, **SETTINGS | {"cache_type": "f16", "device": "cpu"}) as engine:
        assert engine.generate([5, 6, 7], PARAMS).usage.completion_tokens == 40
        assert "(qwen3_5, 4 layers)" in engine.fit_line()
