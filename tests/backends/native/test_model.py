"""Whole models with compiled kernels, against the same models in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import SamplingParams
from polarlm.engine.backends.native.ops import NativeOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import Ops
from polarlm.engine.jit.compile.target import VARIABLE, levels
from polarlm.engine.jit.lang import Level
from polarlm.engine.loading.assembly import assemble
from polarlm.engine.loading.checks import settle
from polarlm.engine.model.batch import StepBatch
from polarlm.engine.model.forward import Transformer
from polarlm.engine.sampling.sample import greedy
from polarlm.engine.state.store import SequenceKV
from polarlm.model_loaders.config import Experts
from scripts.make_golden import answer
from scripts.make_random_model import write
from tests.bare import forward, kl
from tests.conftest import FIXTURES
from tests.pairs import in_turn
from tests.random_model import TINY, random_model, tokenizer_file
from tests.shared_data import shared
from tests.tiny import VOCABULARY, load_tiny, make_model

FAMILIES = sorted(path.name for path in FIXTURES.iterdir())
# With attention alone, a mixture of experts, short convolutions, and gated delta rules.
FEW = ["gemma2_capped_tied", "olmoe_all_heads", "lfm2_tied", "qwen3_next_shared_keys"]
LEVELS_OF_BFLOAT = [level for level in levels() if level.matrices is not None]
# Nats between the best two tokens of a step. Rounding may decide a closer one.
MARGIN = 0.05


def step_logits(model: Transformer, ids: Sequence[int], prompt: int) -> np.ndarray:
    """Logits (T − prompt, V) of steps, one for each of `ids` (T,) after the first `prompt`, which are prefilled."""
    kept: list[np.ndarray] = []

    def keep(chosen: Any, logits: Any, sampler_inputs: Any) -> list[Any]:
        kept.append(model.ops.to_host(logits).copy())
        return []

    fetch, model.ops.fetch_tokens = model.ops.fetch_tokens, keep
    sequence = _prefilled(model, ids[:prompt])
    try:
        for id in ids[prompt:]:
            span = model.store.open_step(sequence)
            model.step(StepBatch([span], [id], [greedy(model.config.vocab_size)])).wait()
            model.store.commit(span)
    finally:
        model.store.release(sequence)
        model.ops.fetch_tokens = fetch
    return np.concatenate(kept)


def chunk_logits(model: Transformer, ids: Sequence[int], prompt: int) -> np.ndarray:
    """As `step_logits`, but with the rows of a block at once; they read the same keys and values."""
    size, kept = model.store.shape.block_size, []
    sequence = _prefilled(model, ids[:prompt])
    start = prompt
    while start < len(ids):
        chunk = ids[start : (start // size + 1) * size]
        span = model.store.open(sequence, len(chunk), as_steps=True)
        kept.append(model.logits(forward(model, [span], chunk)))
        model.store.commit(span)
        start += len(chunk)
    model.store.release(sequence)
    return np.concatenate(kept)


def _prefilled(model: Transformer, ids: Sequence[int]) -> SequenceKV:
    sequence = model.store.new_sequence()
    span = model.store.open(sequence, len(ids))
    forward(model, [span], ids)
    model.store.commit(span)
    return sequence


def scored(path: Path, ops: Ops, ids: list[int], prompt: int, cache_type: str, **settings: object) -> np.ndarray:
    """Logits (T − prompt, V) of the ids after the prompt: by steps of compiled kernels, or of NumPy, which takes the
    rows of a block at once."""
    return all_scored(path, ops, [(ids, prompt)], cache_type, **settings)


def all_scored(
    path: Path, ops: Ops, texts: list[tuple[list[int], int]], cache_type: str, **settings: object
) -> np.ndarray:
    """`scored` for several texts, each with the length of its prompt, one after another."""
    settings = {"cache_type": cache_type, "ctx_size": 512, **settings}
    parts = assemble(settle(path, None, settings), None, ops=ops)
    score = chunk_logits if ops.backend == "numpy" else step_logits
    logits = np.concatenate([score(parts.model, ids, prompt) for ids, prompt in texts])
    parts.close()
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("cache_type", ["balanced", "polarquant"])
def test_steps_over_codes_are_the_same_at_every_level(
    cache_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids and log-probabilities of a greedy answer. Levels that fuse multiply-adds compute in one order, so they agree
    in every bit; `generic` does not, and a rounding changes some codes. `polarquant` multiplies other factors with
    VBMI."""
    path, prompt = random_model(tmp_path), np.random.default_rng(1).integers(5, 255, 200).tolist()
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=0)
    settings = {"cache_type": cache_type, "ctx_size": 512, "calibration": False, "input_bits": 16}

    def answered(level: Level) -> tuple[list[int], list[float]]:
        monkeypatch.setenv(VARIABLE, level.name)
        with load_tiny(path, ops=NativeOps(1), **settings) as engine:
            answer = engine.generate(prompt, params)
        assert answer.logprobs is not None
        return list(answer.token_ids), [token.logprob for token in answer.logprobs]

    answers = {level: answered(level) for level in levels()}
    fused = {level: actual for level, actual in answers.items() if "fma" in level.needs}
    vbmi = [level for level in fused if cache_type == "polarquant" and "avx512vbmi" in level.needs]
    others = {level: actual for level, actual in fused.items() if level not in vbmi}
    for level, actual in others.items():
        assert actual == next(iter(others.values())), level.name
    for level, (ids, logprobs) in answers.items():
        wanted_ids, wanted = answers[levels()[-1]]
        first = next((i for i, (a, b) in enumerate(zip(ids, wanted_ids, strict=True)) if a != b), len(ids))
        assert first >= 8, level.name
        np.testing.assert_allclose(logprobs[:first], wanted[:first], atol=MARGIN, err_msg=level.name)


CACHES = [*((name, "ring4/ring3.5") for name in FEW), ("llama_mha", "polarquant")]


@pytest.mark.parametrize(("name", "cache_type"), CACHES)
def test_a_quantized_cache_costs_what_it_costs_in_float32(name: str, cache_type: str, tmp_path: Path) -> None:
    """Heads of 8 or 16 numbers are few: a code that rounds the other way changes more than in a real model, and in a
    mixture of experts also which of them are chosen."""
    path, ids = make_model(tmp_path, name), np.random.default_rng(0).integers(5, VOCABULARY, 120).tolist()
    settings = {"block_size": 16, "ctx_size": 128, "calibration": False}
    exact = scored(path, NumpyOps(1), ids, 50, "f16", **settings)
    wide = scored(path, NumpyOps(1), ids, 50, cache_type, **settings)
    actual = scored(path, NativeOps(1), ids, 50, cache_type, **settings)
    share = 0.2 if "moe" in name or "experts" in name else 0.1
    assert kl(wide, actual) < share * kl(exact, wide)
    assert kl(exact, actual) == pytest.approx(kl(exact, wide), rel=0.2)


@pytest.mark.slow  # the contract of every family
@pytest.mark.parametrize("name", FAMILIES)
def test_families_compute_as_transformers_does_and_packed_weights_as_numpy_does(name: str, tmp_path: Path) -> None:
    """Scores read keys and values as halves, which are 2⁻¹¹ of a number apart. Where weights of 16 bits become words in
    prompts, they may differ by twice as much."""
    path, reference = make_model(tmp_path, name), np.load(FIXTURES / name / "reference.npz")
    ids, atol = reference["ids"].tolist(), 4 * 2**-11 * np.ptp(reference["logits"])
    actual = {}
    for weight_type, ops in (("f32", None), ("as-stored", None), ("q8_0", None), ("q8_0", NumpyOps())):
        settings = {"ctx_size": 128, "cache_type": "f16", "calibration": False, "weight_type": weight_type}
        with load_tiny(path, ops=ops, device="cpu", **settings) as engine:
            assert engine._model.ops.backend == ("numpy" if ops else "native")
            actual[weight_type, ops is None] = engine.score(ids, logits=True).logits
            has_experts = any(isinstance(layer.ffn, Experts) for layer in engine._model.config.layers)
    pairs = [
        (actual["f32", True], reference["logits"], atol),
        (actual["as-stored", True], reference["logits"], 2 * atol),
    ]
    for one, other, most in (*pairs, (actual["q8_0", True], actual["q8_0", False], atol)):
        is_far = (np.abs(one - other) > most).any(-1)
        # Of two experts that are about equally good a rounding may choose the other.
        assert is_far.mean() <= (0.03 if has_experts else 0), np.abs(one - other).max()


@pytest.mark.slow
@in_turn("name", FAMILIES if LEVELS_OF_BFLOAT else [])
def test_families_compute_as_transformers_does_in_bfloat16(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a CPU multiplies bfloat16, that is what an engine does; inputs, and maybe weights, are 2⁻⁸ of a number
    apart, which now and then chooses another expert, or divides by the norm of a key that is almost 0. A prompt that is
    cut gives the same logits to the bit."""
    monkeypatch.setenv(VARIABLE, LEVELS_OF_BFLOAT[-1].name)
    (folder := tmp_path / name).mkdir()
    path, reference = make_model(folder, name), np.load(FIXTURES / name / "reference.npz")
    ids, found = reference["ids"].tolist(), []
    for rows in (512, 7):
        with load_tiny(path, device="cpu", ctx_size=128, cache_type="f16", calibration=False) as engine:
            assert "of bfloat16" in engine.fit_line()
            engine._model.ops.prefill_rows = rows
            found.append(engine.score(ids, logits=True).logits)
    np.testing.assert_array_equal(*found)
    errors = np.abs(found[0] - reference["logits"]).max(-1) / np.ptp(reference["logits"])
    assert np.median(errors) < 2 * 2**-8
    assert (errors > 8 * 2**-8).mean() <= 0.05


def test_a_layer_without_kernels_is_numpys(tiny_path: Path) -> None:
    prompt = np.random.default_rng(0).integers(5, VOCABULARY, 100).tolist()
    greedy_params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    settings = {"block_size": 32, "ctx_size": 256, "cache_type_k": "polarpair-m4n4+minmax@1,f16", "cache_type_v": "f16"}
    answers = []
    for ops, kinds in (NativeOps(1), ["TileCache", "LayerCache"]), (NumpyOps(1), ["LayerCache"] * 2):
        with load_tiny(tiny_path, ops=ops, **settings) as engine:
            first = engine.generate(prompt, greedy_params).token_ids
            answers.append((first, engine.generate([*prompt, *first, *prompt[:20]], greedy_params).token_ids))
            assert [type(engine._store.cache(layer)).__name__ for layer in (0, 1)] == kinds
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("kind", "bits"), [("q8_0", 16), ("q4_k", 16), ("iq3_s", 16), ("q4_k", 8)])
def test_packed_weights_compute_as_float32_does(kind: str, bits: int, tmp_path: Path) -> None:
    """With inputs of 8 bits to a ten-thousandth of a nat, and not exactly."""
    path = tmp_path / "model.gguf"
    write(path, "tiny", TINY, kind, tokenizer_file(tmp_path))
    ids = np.random.default_rng(0).integers(5, 250, 200).tolist()
    native = NativeOps(1)
    exact, actual = (scored(path, ops, ids, 130, "f16", input_bits=bits) for ops in (NumpyOps(1), native))
    has_bytes = "8 bits" in native.inputs
    assert (1e-7 if has_bytes else 0) < kl(exact, actual) < (1e-4 if has_bytes else 1e-7)


def test_logits_are_the_same_for_any_number_of_threads(tmp_path: Path) -> None:
    """To the last bit: of a prompt, its codes, and steps."""
    path, ids = make_model(tmp_path), np.random.default_rng(1).integers(5, VOCABULARY, 200).tolist()
    settings = {"block_size": 16, "calibration": False}
    one, *others = (scored(path, NativeOps(threads), ids, 120, "balanced", **settings) for threads in (1, 2, 5))
    for actual in others:
        np.testing.assert_array_equal(actual, one)


@pytest.mark.slow  # needs a real model
def test_greedy_answers_over_codes_are_those_of_float32() -> None:
    """Queries of 8 bits (7 on CPUs that add two products in 16 bits) and codes that round the other way change margins
    by .02 to .07 nats, root mean square. Where the best two tokens are four times as far apart, float32 over codes has
    the same token. Answers are so long that steps read quantized blocks."""
    path, beginnings = shared("models", "stories15M"), ("Once upon a time", "Tom and his sister went to the sea")
    with load_tiny(path, ops=NativeOps(1), cache_type="ring4", ctx_size=512) as engine:
        prompts = [engine.tokenize(beginning) for beginning in beginnings]
        answers = [answer(engine, prompt, 160)[0] for prompt in prompts]
    texts = [([*prompt, *ids[:-1]], len(prompt) - 1) for prompt, ids in zip(prompts, answers, strict=True)]
    wide, exact = (all_scored(path, NumpyOps(1), texts, cache_type) for cache_type in ("ring4", "f16"))
    assert 0 < kl(wide, all_scored(path, NativeOps(1), texts, "ring4")) < kl(exact, wide) / 2
    best = wide.argsort(-1)[:, :-3:-1]
    first, second = np.take_along_axis(wide.astype(np.float64), best, axis=-1).T
    is_decided = first - second >= 0.3
    np.testing.assert_array_equal(np.concatenate(answers)[is_decided], best[is_decided, 0])
    assert is_decided.mean() > 0.75, "too few steps are decided"
