"""What fits on a machine, beside what loading really allocates there."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm import model_loaders
from polarlm.bench.command import CacheType
from polarlm.bench.quality import cache_cost
from polarlm.engine import Engine, EngineConfig, EngineError
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.ops import Ops
from polarlm.engine.backends.select import select
from polarlm.engine.chat.session import Turn, numbers
from polarlm.engine.config import AS_STORED
from polarlm.engine.loading.checks import settle
from polarlm.engine.loading.encoding import FULL_ENCODING
from polarlm.engine.loading.fit import (
    CACHE_TYPES,
    Advice,
    CacheFit,
    DeviceFit,
    WeightFit,
    advise,
    devices,
    fit_device,
    fit_weights,
)
from polarlm.engine.loading.need import PROCESS_BYTES, need
from polarlm.engine.loading.placement.place import place
from polarlm.engine.loading.placement.request import PlacementRequest, Sizes, request_from_source
from polarlm.engine.loading.sizes import cache_shape, weight_format
from polarlm.engine.model.weights import load_weights, weight_bytes
from polarlm.engine.quantization.conditioning import Conditioning
from polarlm.engine.state.plan import format_bytes, plan_for_tokens
from polarlm.engine.state.recurrent.delta import DeltaState
from polarlm.engine.state.store import KVStore
from polarlm.fit import main as command
from polarlm.model_loaders.config import Attention, GatedMLP, Layer
from polarlm.server.http.plain.stats import stats
from polarlm.server.running.counters import Totals
from tests.cuda.emulated import EmulatedDevice
from tests.model_loaders.checkpoints import config_of, quantized_model
from tests.tiny import make_model

MIB = 1 << 20


def fits(path: Path, ops: Ops, contexts=(), types=CACHE_TYPES, **settings) -> DeviceFit:
    config, source, _ = model_loaders.load_weights(path)
    try:
        return fit_device(EngineConfig(**settings), "cpu", ops, config, source, types, contexts)
    finally:
        source.close()


def cpu() -> Ops:
    ((name, ops),) = devices("cpu")
    assert name == "cpu"
    return ops


@pytest.mark.parametrize(
    ("cache_type", "size"),
    [("f16", 6 * MIB), ("quality", 6 * MIB), ("balanced", 6 * MIB), ("compact", 6 * MIB), ("balanced", 1024 * MIB)],
)
def test_the_longest_context_is_what_an_engine_gets(tiny_path: Path, memory, cache_type: str, size: int) -> None:
    """With too little memory for the model's own context, and with plenty."""
    memory(size)
    result = fits(tiny_path, cpu(), kept_sequences=0, parallel=1).weights[0]
    with Engine.load(tiny_path, device="cpu", cache_type=cache_type, kept_sequences=0, parallel=1) as engine:
        stats, loaded = engine.cache_stats(), engine._model.weights.bytes
        assert result.bytes == loaded
        cache = result.cache(cache_type)
        assert cache.tokens == engine._store.plan.tokens
        assert cache.bits_per_value == stats.bits_per_value


def test_the_bits_of_a_cache_are_those_of_its_whole_context_wherever_they_are_told(tiny_path: Path, capsys) -> None:
    """Of a preset, whose newest blocks are in full precision. What is reserved beside the context is named."""
    assert command([str(tiny_path), "--device", "cpu", "-c", "4096"]) == 0
    said = capsys.readouterr().out
    with Engine.load(tiny_path, device="cpu", ctx_size=4096, calibration=False) as engine:
        shape, plan, cache = engine.cache_shape, engine._store.plan, engine.cache_stats()
        bits = f"{shape.bits_of_text(4096):.2f}"
        assert f"{shape.bits_per_value:.2f}" != bits
        size = shape.sequence_bytes(4096)
        room = f"{format_bytes(plan.bytes)} reserved, with {format_bytes(plan.bytes - size)} of room"
        smaller = f"{bits} bits/value, {shape.f16_bytes(4096) / size:.1f}× smaller than f16"
        assert smaller in engine.start_line()
        assert f"({bits} bits/value)" in engine.fit_line()
        assert re.search(rf"^balanced +{bits} +{format_bytes(size / 4096)} ", said, re.MULTILINE)
        assert f"balanced takes {format_bytes(size)} ({room} " in said
        assert room in engine.fit_line()
        whole = stats(engine, Totals(), engine.status(), None)["whole_context"]
        assert (whole["bits_per_value"], whole["bytes"]) == (shape.bits_of_text(4096), size)
        assert f"{bits} bits per value" in numbers(Turn("", (), "stop", None), engine)
        config = replace(engine.model.config, max_context=4096)
    assert cache_cost._fit(CacheType.read("balanced"), cpu(), config, 0).bits_per_value == cache.bits_per_value


@pytest.mark.parametrize("weight_type", [AS_STORED, "q8_0", "q4_0", "f32"])
def test_weights_take_what_loading_takes(tiny_path: Path, weight_type: str) -> None:
    ops = cpu()
    row = next(one for one in fits(tiny_path, ops).weights if one.weight_type == weight_type)
    config, source, _ = model_loaders.load_weights(tiny_path)
    loaded = load_weights(ops, config, source, None, weight_format(EngineConfig(weight_type=weight_type)))
    source.close()
    assert row.bytes == loaded.bytes


@pytest.mark.parametrize("cache_type", ["f16", "compact"])
def test_a_mixture_is_placed_as_it_is_loaded_with_each_cache_type(tmp_path: Path, memory, cache_type: str) -> None:
    """With few experts in memory at a time: a cache that takes less leaves room for more of them."""
    path = make_model(tmp_path, "qwen3_moe_normed")
    memory(220 * 1024)
    row = fits(path, cpu(), kept_sequences=0, parallel=1).weights[0].cache(cache_type)
    with Engine.load(path, device="cpu", cache_type=cache_type, kept_sequences=0, parallel=1) as engine:
        assert engine.expert_plan is not None
        assert (row.tokens, row.experts) == (engine._store.plan.tokens, engine.expert_plan)


@pytest.mark.parametrize(("kv_memory", "is_met"), [(None, False), ("2M", True), ("4M", True), ("8M", False)])
def test_a_store_of_a_size_may_take_all_that_the_weights_leave(
    tiny_path: Path, memory, kv_memory: str | None, is_met: bool
) -> None:
    """Where no size is named it takes at most half, and the context has to fit."""
    memory(6 * MIB)
    config, source, _ = model_loaders.load_weights(tiny_path)
    wanted = request_from_source(EngineConfig(ctx_size=1_000_000, kv_memory=kv_memory), cpu(), config, source)
    source.close()
    assert place(wanted, cpu()).is_met == is_met


def test_a_row_says_what_is_not_kept_as_it_is_stored(tmp_path: Path, memory, capsys) -> None:
    pytest.importorskip("llvmlite")
    memory(1024 * MIB)
    quantized_model(tmp_path / "small.gguf", "NVFP4")
    assert command(["--device", "cpu", str(tmp_path / "small.gguf")]) == 0
    page = capsys.readouterr().out
    assert "NVFP4 weights kept as q8_0 take " in page
    assert re.search("^as-stored: NVFP4 kept as q8_0  ", page, re.MULTILINE)
    assert re.search("^q4_0  ", page, re.MULTILINE)


def test_as_many_sequences_fit_as_can_be_loaded(tiny_path: Path, memory) -> None:
    """One more has no blocks of its own."""
    memory(24 * MIB)
    (context,) = fits(tiny_path, cpu(), contexts=[200]).weights[0].cache("balanced").contexts
    assert context.sequences > 1
    assert context.lacking == 0
    for count, fit in ((context.sequences, True), (context.sequences + 1, False)):
        with Engine.load(tiny_path, device="cpu", ctx_size=200 * count, parallel=count) as engine:
            assert (engine._store.plan.sequences(200) >= count) == fit


def test_what_does_not_fit_says_by_how_much(tiny_path: Path, memory) -> None:
    """With so much more room, and not with less, one sequence fits."""
    ops, size = cpu(), 2 * MIB
    memory(size)
    (context,) = fits(tiny_path, ops, contexts=[20_000]).weights[0].cache("f16").contexts
    assert context.sequences == 0
    assert context.lacking > 0
    memory(size + 2 * context.lacking)
    assert fits(tiny_path, ops, contexts=[20_000]).weights[0].cache("f16").contexts[0].sequences == 1
    memory(size + context.lacking)
    assert fits(tiny_path, ops, contexts=[20_000]).weights[0].cache("f16").contexts[0].sequences == 0


def test_weights_that_are_too_large_say_by_how_much(tiny_path: Path, memory) -> None:
    memory(1000)
    for weights in fits(tiny_path, cpu()).weights:
        assert weights.lacking == weights.bytes - 1000
        assert weights.room == 0
        assert all(one.tokens == 0 for one in weights.caches)


def test_a_gpu_says_which_types_it_lacks(tiny_path: Path) -> None:
    ops = CudaOps(EmulatedDevice())
    result = fits(tiny_path, ops, types=("balanced", "polarpair-m4n4+g8/f16"))
    assert result.free == ops.free_memory() > 0
    assert "no GPU kernel" in result.weights[0].cache("polarpair-m4n4+g8/f16").problem
    assert result.weights[0].cache("balanced").tokens == 256


def test_a_size_in_bytes_is_enough_for_the_weights(tiny_path: Path, memory) -> None:
    """As for a file that has not been fetched yet."""
    memory(64 * MIB)
    config, source, _ = model_loaders.load_weights(tiny_path)
    size = weight_bytes(cpu(), source)
    source.close()
    assert fit_weights(PlacementRequest(EngineConfig(), config, Sizes(size)), cpu()) == replace(
        fits(tiny_path, cpu()).weights[0], kept=()
    )
    assert fit_weights(PlacementRequest(EngineConfig(), config, Sizes(65 * MIB)), cpu()).lacking == MIB


def test_without_a_gpu_there_is_one_device() -> None:
    assert [name for name, _ in devices("auto")] == ["cpu"] or select("auto", 0)[0].name != "cpu"
    with pytest.raises(EngineError, match="device=tpu"):
        devices("tpu")


# -- advice --------------------------------------------------------------------------------------------------------

LAYER = Layer(Attention(2, 1, 8, model_loaders.RopeConfig()), GatedMLP(8))
MODEL = model_loaders.ModelConfig("llama", (LAYER, LAYER), 8, 96, 32_768, 1e-5)


def weight_fit(weight_type: str, size: int, lacking: int = 0, **tokens: int) -> WeightFit:
    caches = tuple(CacheFit(name, tokens=count, store_bytes=MIB) for name, count in tokens.items())
    return WeightFit(weight_type, size, 0, lacking, caches)


def advice(*weights: WeightFit, ctx_size: int = 0, gpu: tuple[WeightFit, ...] = ()) -> Advice:
    result = [DeviceFit("cpu", "cpu", MIB, weights)]
    if gpu:
        result.insert(0, DeviceFit("cuda", "a GPU", MIB, gpu))
    return advise(result, EngineConfig(ctx_size=ctx_size), MODEL)


ALL = {"f16": 32_768, "quality": 32_768, "balanced": 32_768, "compact": 32_768}
NONE = dict.fromkeys(ALL, 0)


WHOLE_FITS = weight_fit(AS_STORED, 100, **ALL)
TOO_LARGE = weight_fit(AS_STORED, 100, lacking=3, **NONE)
LITTLE = weight_fit(AS_STORED, 100, f16=5_000, quality=17_000, balanced=20_000, compact=25_000)
Q4_0, Q8_0 = weight_fit("q4_0", 50, **ALL), weight_fit("q8_0", 90, **ALL)


@pytest.mark.parametrize(
    ("weights", "more", "settings", "sentence"),
    [
        ((WHOLE_FITS, Q4_0), {}, {}, "32,768 tokens fits"),
        ((WHOLE_FITS,), {"ctx_size": 32_768}, {"ctx_size": 32_768}, "32,768 tokens fits"),
        ((LITTLE, Q4_0), {}, {"cache_type": "compact", "ctx_size": 25_000}, "25,000 fit.* with f16, 5,000"),
        # Weights are converted only to what is smaller, and only where no device has them as they are.
        ((TOO_LARGE, weight_fit("f32", 400, 303, **NONE), Q8_0), {}, {"weight_type": "q8_0"}, "as the file has them"),
        ((WHOLE_FITS, Q8_0), {"gpu": (TOO_LARGE, Q8_0)}, {"device": "cpu"}, "32,768 tokens fits"),
        ((weight_fit(AS_STORED, MIB, **{**NONE, "compact": 300}),), {}, None, "300 tokens"),
        (
            (weight_fit(AS_STORED, 3 * MIB, 2 * MIB, **NONE), weight_fit("q4_0", 2 * MIB, MIB, **NONE)),
            *({}, None, "2.0 MiB as q4_0, 1.0 MiB too much"),
        ),
    ],
)
def test_advice(weights: tuple[WeightFit, ...], more: Any, settings: dict[str, Any] | None, sentence: str) -> None:
    result = advice(*weights, **more)
    assert result.settings == settings
    assert re.search(sentence, result.sentence)


def test_a_store_of_windows_holds_fewer_sequences_than_its_longest_context_would() -> None:
    """The blocks of a window are for one sequence."""
    layers = (replace(LAYER, mixer=replace(LAYER.mixer, head_dim=64, window=window)) for window in (512, None))
    model = replace(MODEL, layers=tuple(layers))
    result = fit_weights(PlacementRequest(EngineConfig(), model, Sizes(0)), cpu(), ["balanced"], [4096])
    assert result.caches[0].contexts[0].sequences == 1


@pytest.fixture
def hybrid(tmp_path: Path) -> Path:
    return make_model(tmp_path, "qwen3_5_tied")


@pytest.mark.parametrize("on_gpu", [False, True])
def test_snapshots_are_counted_where_they_lie(hybrid: Path, on_gpu: bool) -> None:
    """In the computer's memory: a GPU's KV store leaves them out."""
    ops = CudaOps(EmulatedDevice(checked=False)) if on_gpu else cpu()
    model, plans = config_of(hybrid), []
    for size in (1 * MIB, 3 * MIB):
        config = EngineConfig(state_cache=str(size), cache_type="f16")
        plans.append(plan_for_tokens(cache_shape(config, FULL_ENCODING, ops, model), 256, 1))
        store = KVStore(ops, plans[-1], [Conditioning()] * len(model.layers))
        (state,) = (group for group in store.groups if isinstance(group, DeltaState))
        arrays = [array for of_layer in state._snapshots.values() for array in of_layer.values()]
        assert {type(array) for array in arrays} == {np.ndarray}
        assert plans[-1].snapshot_bytes == sum(array.nbytes for array in arrays)
        assert 0.99 * size < plans[-1].snapshot_bytes <= size
    more = plans[1].snapshot_bytes - plans[0].snapshot_bytes
    assert plans[1].bytes - plans[0].bytes == (0 if on_gpu else more)


# -- beside other models ---------------------------------------------------------------------------------------


def test_what_a_model_needs_is_what_it_takes_when_it_is_loaded(tiny_path: Path) -> None:
    config = settle(tiny_path, None, {"device": "cpu", "calibration": False, "cache_type": "f16", "parallel": 2})
    result = need(config)
    assert result.fits
    with Engine.load(config=config) as engine:
        assert result.tokens == engine.context
        assert result.bytes == PROCESS_BYTES + engine._model.weights.bytes + engine._parts.plan.bytes
        assert result.store == engine._parts.plan.bytes


def test_the_least_that_a_model_needs_is_the_least_that_it_fits_into(tiny_path: Path) -> None:
    config = settle(tiny_path, None, {"device": "cpu"})
    least = need(config, {"cpu": 1 << 60})
    assert (least.fits, least.store, least.tokens) == (False, 0, 0)
    assert need(config, limit=least.bytes).fits
    assert not need(config, limit=least.bytes - 1).fits
    tight = need(config, limit=least.bytes)
    assert (tight.bytes, tight.tokens) == (least.bytes, 256)


def test_memory_that_others_will_take_is_left_to_them(tiny_path: Path, memory) -> None:
    """As everywhere on a CPU, the store may have half of what the weights, and the others, leave."""
    config = settle(tiny_path, None, {"device": "cpu"})
    whole, free = need(config), 1 << 20
    memory(free)
    weights = whole.bytes - whole.store - PROCESS_BYTES
    reserved = free - weights - 2 * whole.store
    assert need(config, {"cpu": reserved, "another": 1 << 60}).store == whole.store
    assert need(config, {"cpu": reserved + 2}).store < whole.store
