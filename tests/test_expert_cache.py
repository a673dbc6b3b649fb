"""Experts that are read when they are chosen: answers equal the answers of a model whose experts are all loaded."""

from __future__ import annotations

import os
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from polarlm import model_loaders
from polarlm.bench.shapes import SHAPES
from polarlm.engine import Engine, EngineConfig, EngineError, SamplingParams, codecs
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.native.ops import NativeOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import Ops
from polarlm.engine.loading import assembly
from polarlm.engine.loading.checks import settle
from polarlm.engine.loading.encoding import FULL_ENCODING, encode_layers
from polarlm.engine.loading.fit import DeviceFit, advise, fit_weights
from polarlm.engine.loading.placement import experts as placed_experts
from polarlm.engine.loading.placement.experts import ExpertPlan, expert_plan, fitting_bytes
from polarlm.engine.loading.placement.request import PlacementRequest, Sizes, request_from_bytes, request_from_source
from polarlm.engine.quantization.conditioning import Scale
from polarlm.engine.quantization.statistics import neutral
from polarlm.engine.state.layer_shapes import LayerShape
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.weight_formats import Matrix
from polarlm.server.http.plain import metrics, stats
from polarlm.server.running.counters import Totals
from scripts.make_random_model import write
from tests.call_templates import NO_TOOLS
from tests.compiled import end_of_compilation
from tests.cuda.emulated import EmulatedDevice
from tests.little_memory import answer_in
from tests.model_loaders.checkpoints import config_of
from tests.tiny import ids, make_model
from tests.tool_model import tool_model

SETTINGS: dict[str, Any] = {"block_size": 16, "ctx_size": 256, "calibration": False}
SOME = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, logprobs=3)
GIB = 1 << 30
PROMPTS = [ids(seed, 40 + seed) for seed in range(3)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A mixture of eight experts, of which a token chooses four."""
    return make_model(tmp_path, "qwen3_moe_normed")


def load(path: Path, ops: Ops | None = None, said: list[str] | None = None, **settings: Any) -> Engine:
    config = settle(path, None, {**SETTINGS, **settings})
    return Engine(assembly.assemble(config, None if said is None else said.append, ops=ops or NativeOps(1)))


def sizes_of(path: Path, ops: Ops | None = None) -> Sizes:
    model, source, _ = model_loaders.load_weights(path)
    try:
        return request_from_source(EngineConfig(), ops or NativeOps(1), model, source).sizes
    finally:
        source.close()


def expert_parts(engine: Engine) -> list[Matrix]:
    layers = engine._model.weights.layers
    return [part for layer in layers for part in layer.ffn.gate_up.parts + layer.ffn.down.parts]


@pytest.mark.parametrize(
    ("name", "count", "chosen"), [("qwen3_moe_normed", 8, 4), ("mixtral_window", 4, 2), ("gpt_oss_mxfp4", 4, 2)]
)
def test_a_cache_changes_no_answer(name: str, count: int, chosen: int, tmp_path: Path) -> None:
    """Prompts that choose all experts, steps of one sequence, and steps of several."""
    path, found = make_model(tmp_path, name), []
    for experts in (None, str(sizes_of(path).experts * chosen // count)):
        with load(path, expert_cache=experts) as engine:
            alone = engine.generate(PROMPTS[0], SOME)
            together = [*zip_longest(*(engine.stream(prompt, SOME) for prompt in PROMPTS))]
            scores = engine.score(PROMPTS[1], logits=True)
            found.append((alone.token_ids, alone.logprobs, together_ids(together), scores.logits.tobytes()))
            status = engine.status().experts
            assert (status is not None) == (experts is not None)
    assert found[0] == found[1]
    assert status.experts == chosen
    assert status.hits > 0
    assert status.misses > 0


def together_ids(rounds: list[tuple[Any, ...]]) -> list[list[int]]:
    return [[token for chunk in chunks if chunk for token in chunk.token_ids] for chunks in zip(*rounds, strict=True)]


def test_the_memory_is_what_was_given(path: Path) -> None:
    whole = sizes_of(path)
    with load(path, expert_cache=str(whole.experts // 2 + 100)) as engine:
        parts = expert_parts(engine)
        assert sum(part.data.memory.nbytes for part in parts) <= whole.experts  # tiles of 16 rows: half are padding
        assert all(part.data.slots == 4 for part in parts)
        assert engine._model.weights.bytes == whole.weights - whole.experts // 2
        assert "at a time, read from the file as they are chosen" in engine.fit_line()


def plan_for(path: Path, whole: Sizes, **settings: Any) -> ExpertPlan | None:
    ops, wanted = NativeOps(1), PlacementRequest(EngineConfig(**settings), config_of(path), whole)
    return expert_plan(wanted, ops, wanted.shape(ops))


@pytest.mark.parametrize(
    ("free", "settings", "experts"),
    [
        (11 * GIB, {}, None),
        (10 * GIB + (64 << 10), {"calibration": False}, 7),  # all weights would fit, but not with 4,096 tokens
        (8 * GIB, {"calibration": False}, 5),  # 5 experts of 8: 6 GiB are left beside the other weights
        (8 * GIB, {}, 4),  # fitting the cache takes memory for a moment
    ],
)
def test_as_many_experts_as_memory_leaves_are_loaded(
    path: Path,
    memory: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    *,
    free: int,
    settings: dict[str, Any],
    experts: int | None,
) -> None:
    monkeypatch.setattr(placed_experts, "fitting_bytes", lambda shape: 2 * GIB)
    memory(free)
    plan = plan_for(path, Sizes(10 * GIB, (8 * GIB,)), **settings)
    assert (plan and plan.experts) == experts
    if experts == 5:
        assert plan.bytes == 5 * GIB
        assert plan.token_bytes == 8 * GIB // 8 * 4 * 3 // 8  # three of eight are not in memory
        assert plan.room == (8 - 2 - 4) * GIB // 2


def test_experts_of_one_token_have_to_fit(path: Path, memory: Callable[[int], None]) -> None:
    memory(5 * GIB)
    with pytest.raises(EngineError, match=r"weights take 10\.0 GiB"):
        plan_for(path, Sizes(10 * GIB, (8 * GIB,)))


@pytest.mark.parametrize(("kv_heads", "head_dim", "layers"), [(8, 64, 4), (16, 128, 2)])
def test_what_fitting_the_cache_takes_is_counted(kv_heads: int, head_dim: int, layers: int) -> None:
    one = LayerShape(codecs.get("ring4"), codecs.get("ring3.5"), kv_heads, head_dim, 8)
    shape = CacheShape(64, (one,) * layers)
    scale = Scale(np.ones((kv_heads, head_dim), np.float32), np.ones(kv_heads, np.float32))
    statistics = {layer: neutral(kv_heads, head_dim) for layer in range(layers)}
    end_of_compilation()
    tracemalloc.start()
    encode_layers(FULL_ENCODING, shape, [scale] * layers, statistics)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < fitting_bytes(shape) < 1.5 * most


def test_fit_says_how_many_experts_are_in_memory(path: Path, memory: Callable[[int], None]) -> None:
    """Weights that can be converted until they fit are converted, since a token then reads nothing."""
    ops, config, model = NativeOps(1), EngineConfig(), config_of(path)
    memory(8 * GIB)
    stored, q4_0 = (
        fit_weights(PlacementRequest(config, model, Sizes(size * GIB, ((size - 1) * GIB,))), ops) for size in (10, 4)
    )
    assert stored.experts is not None
    assert q4_0.experts is None
    assert stored.cache("balanced").tokens == model.max_context
    q4_0 = replace(q4_0, weight_type="q4_0")
    alone, both = (
        advise([DeviceFit("cpu", "cpu", 8 * GIB, found)], config, model) for found in ((stored,), (stored, q4_0))
    )
    assert alone.settings == {}
    assert "Not all experts fit." in alone.sentence
    assert "a token reads 1.7 GiB from the file" in alone.sentence
    assert both.settings == {"weight_type": "q4_0"}


def test_experts_have_their_share_of_a_file_that_is_not_fetched(path: Path) -> None:
    whole = sizes_of(path)
    wanted = request_from_bytes(EngineConfig(), NativeOps(1), config_of(path), whole.weights)
    assert wanted.sizes.experts == pytest.approx(whole.experts, rel=0.02)


def test_a_size_for_less_than_a_token_says_what_is_needed(path: Path) -> None:
    with pytest.raises(EngineError, match=r"room for 3 of the 8 experts.*a token needs 4: give at least 1M"):
        load(path, expert_cache=str(sizes_of(path).experts * 3 // 8 + 10))
    with pytest.raises(EngineError, match=r"expert_cache=some: this is not a size"):
        load(path, expert_cache="some")


@pytest.mark.parametrize("ops", [NumpyOps(1), CudaOps(EmulatedDevice())], ids=["numpy", "cuda"])
def test_other_backends_load_all_experts_and_say_so(ops: Ops, path: Path) -> None:
    said: list[str] = []
    load(path, ops, said, expert_cache="1G").close()
    assert any(f"expert_cache has no effect with {ops.backend}" in sentence for sentence in said)


def test_a_model_without_experts_says_so(tiny_path: Path) -> None:
    said: list[str] = []
    load(tiny_path, None, said, expert_cache="1G", state_cache="1G").close()
    assert "expert_cache has no effect on this model: it has no experts." in said
    assert "state_cache has no effect on this model: it has no recurrent layers." in said


def test_a_file_that_changes_ends_the_request_and_not_the_engine(path: Path) -> None:
    (weights,) = path.glob("*.safetensors")
    with load(path, expert_cache=str(sizes_of(path).experts // 2), kept_sequences=0) as engine:
        expected = engine.generate(PROMPTS[0], SOME).token_ids
        size = weights.stat().st_size
        os.truncate(weights, size + 1)
        with pytest.raises(EngineError, match=r"has changed since it was opened; .* start the server") as failed:
            engine.generate(PROMPTS[1], SOME)
        assert failed.value.code == "model_unavailable"
        assert str(path) not in str(failed.value)  # clients get the sentence
        os.truncate(weights, size)  # at another time, which alone is no change
        assert engine.generate(PROMPTS[0], SOME).token_ids == expected


def test_a_server_counts_what_was_read(path: Path) -> None:
    with load(path, expert_cache=str(sizes_of(path).experts // 2)) as engine:
        engine.generate(PROMPTS[0], SOME)
        now = engine.status()
        page = metrics.exposition(engine, Totals(), now, without_cached=False).body.decode()
        assert f'polarlm_chosen_experts_total{{place="file"}} {now.experts.misses}.0' in page
        assert f'polarlm_chosen_experts_total{{place="memory"}} {now.experts.hits}.0' in page
        shown = stats.stats(engine, Totals(), now, None)["experts"]
        counts = {"hits": now.experts.hits, "misses": now.experts.misses, "bytes": now.experts.bytes}
        assert shown == {"experts": 4, **counts}
        parts = expert_parts(engine)
        sizes = {part.data.memory.nbytes // part.data.slots for part in parts}
        assert min(sizes) * now.experts.misses <= now.experts.bytes <= max(sizes) * now.experts.misses


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's private memory")
def test_a_mixture_may_be_larger_than_memory(tmp_path: Path) -> None:
    """A layer of OLMoE has 238 MiB of experts; 220 MiB of private memory are left for it and the program. Slow: it
    makes the file, and processes load it six times."""
    path, tokenizer = tmp_path / "model.gguf", tool_model(tmp_path, NO_TOOLS).with_name("tokenizer.gguf")
    whole = SHAPES["olmoe-1b-7b"]
    write(path, "mixture", replace(whole, layers=whole.layers[:1], vocab_size=1024), "q4_k", tokenizer)

    first = {"expert_cache": "40M"}
    assert "not enough memory" in answer_in(220, path, first, expert_cache="1G")
    third = answer_in(220, path, first, expert_cache="77M")
    assert third.startswith("(")
    assert third == answer_in(1000, path, first, expert_cache="1G")
