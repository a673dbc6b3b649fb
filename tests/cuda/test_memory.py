"""The plan of the KV store leaves the GPU memory that prompts and steps need."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.bench.random_weights import RandomWeights
from polarlm.bench.shapes import LLAMA_8B, llama
from polarlm.engine import Engine, EngineConfig, EngineError, codecs
from polarlm.engine.backends.cuda.device.tracing import TracingArray, TracingDevice
from polarlm.engine.backends.cuda.memory import prompt_bytes, step_bytes
from polarlm.engine.backends.cuda.ops import CudaOps, FirstRow
from polarlm.engine.backends.ops import Load
from polarlm.engine.loading import assembly
from polarlm.engine.loading.encoding import FULL_ENCODING
from polarlm.engine.loading.placement.request import PlacementRequest, Sizes
from polarlm.engine.loading.sizes import cache_shape
from polarlm.engine.model.batch import StepBatch
from polarlm.engine.model.forward import Transformer
from polarlm.engine.model.weights import load_weights
from polarlm.engine.quantization.conditioning import Conditioning
from polarlm.engine.sampling.sample import greedy
from polarlm.engine.state.layer_shapes import LayerShape
from polarlm.engine.state.plan import plan_for_memory, plan_for_tokens
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.state.store import KVStore, SequenceKV
from polarlm.model_loaders.config import (
    Attention,
    ChannelDelta,
    Experts,
    GatedDelta,
    GatedMLP,
    LatentAttention,
    Layer,
    Mamba2,
    ModelConfig,
    RopeConfig,
    ShortConv,
)
from tests.bare import forward, forward_together, shape_of
from tests.pairs import mostly_slow

GB = 10**9
MEMORY = int(23.4e9), 24 * GB  # free and total of a GPU on which driver and desktop take some


class Counting(TracingDevice):
    """Counts the bytes of live arrays.

    peak: since the last `begin`. recorded: the peak of recorded work alone.
    """

    def __init__(self, memory: tuple[int, int] = (GB, 2 * GB)) -> None:
        super().__init__(lambda launch: None, 132, 228 << 10, memory)
        self.live = self.peak = self.recorded = self.aside = 0

    def begin(self) -> int:
        self.peak = self.live
        return self.live

    def empty(self, shape: tuple[int, ...], dtype: Any) -> TracingArray:
        x = super().empty(shape, dtype)
        self.live += x.nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(x._like, self._gone, x.nbytes)  # what views keep alive, too
        return x

    def _gone(self, size: int) -> None:
        self.live -= size

    def run_graph(self, key: Hashable, work: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        before = self.begin()
        result = super().run_graph(key, work, inputs)
        self.recorded = max(self.recorded, self.peak - before)
        return result

    def to_host(self, x: TracingArray) -> np.ndarray:
        """Zeros; but each row of numbers of experts has others, as of rows that all choose the same."""
        zeros = super().to_host(x)
        return zeros + np.arange(x.shape[1], dtype=np.int32) if x.ndim == 2 and x.dtype == np.int32 else zeros

    def reserve_workspace(self, size: int) -> None:
        self.aside = size


def model_of(
    device: Counting, config: ModelConfig, types: tuple[str, str], tokens: int, sequences: int, weights: str = "f16"
) -> Transformer:
    """A model without values: one row of zeros is read for each matrix."""
    ops = CudaOps(device)
    load, load_experts = ops.load, ops.load_experts
    ops.load = lambda matrices: load([FirstRow(matrix) for matrix in matrices])
    ops.load_experts = lambda experts: load_experts([[FirstRow(matrix) for matrix in one] for one in experts])
    loaded = load_weights(ops, config, RandomWeights(config, lambda _: weights))
    k, v = (codecs.get(name) for name in types)
    shape = CacheShape(64, tuple(shape_of(layer.mixer, k, v, 8) for layer in config.layers))
    dim = config.attention.head_dim
    rotated = Conditioning(k.rotation(dim), v.rotation(dim))
    kinds = [rotated if isinstance(layer, LayerShape) else Conditioning() for layer in shape.layers]
    store = KVStore(ops, plan_for_tokens(shape, tokens, sequences), kinds)
    return Transformer(ops, config, loaded, store)


def prompt(model: Transformer, count: int) -> SequenceKV:
    sequence = model.store.new_sequence()
    span = model.store.open(sequence, count)
    hidden = forward(model, [span], [1] * count, outputs=1)
    model.choose(hidden, [greedy(model.config.vocab_size)]).wait()
    model.store.commit(span)
    return sequence


LLAMA = llama(layers=2)
ODD = llama(layers=2, heads=6, kv_heads=2, head_dim=80, hidden_size=480, ffn_size=1000, vocab_size=32003)
GEMMA = replace(
    LLAMA,
    family="gemma3",
    hidden_size=2560,
    vocab_size=262_208,
    layers=tuple(
        Layer(Attention(8, 4, 256, RopeConfig(theta=theta)), GatedMLP(10240, "gelu_tanh"), "both")
        for theta in (1e4, 1e6)
    ),
)
GATED = replace(
    LLAMA,
    family="muse_glimmer",
    layers=(Layer(Attention(32, 2, 128, RopeConfig(), output_gate=True), GatedMLP(8192), "both"),) * 2,
)
SHARED = replace(
    LLAMA,
    family="qwen2_moe",
    hidden_size=2048,
    layers=(Layer(Attention(16, 4, 128, RopeConfig()), Experts(128, 8, 768, shared=GatedMLP(5632), shared_gate=True)),)
    * 2,
)
CONVOLUTIONS = replace(
    LLAMA,
    family="lfm2",
    hidden_size=2048,
    layers=(
        Layer(Attention(16, 4, 64, RopeConfig()), GatedMLP(1024)),
        Layer(ShortConv(2048, 3), GatedMLP(1024)),
    ),
)
DELTA_RULES = replace(
    LLAMA,
    family="qwen3_5",
    hidden_size=2048,
    layers=(
        Layer(Attention(16, 2, 256, RopeConfig(), output_gate=True), GatedMLP(1024)),
        *(Layer(GatedDelta(16, 32, 128, 128, 4), GatedMLP(1024)),) * 2,
    ),
)
CHANNEL_RULES = replace(
    LLAMA,
    family="kimi_linear",
    hidden_size=2304,
    layers=(
        Layer(LatentAttention(32, 1, 576, None, 64, own_dim=128, value_dim=128), GatedMLP(1024)),
        *(Layer(ChannelDelta(32, 32, 128, 128, 4, rank=128), GatedMLP(1024)),) * 2,
    ),
)
NO_NETWORK = Layer(Mamba2(8, 64, 128, 64, 4), None)
MAMBA2 = replace(
    LLAMA,
    family="nemotron_h",
    hidden_size=2688,
    layers=(
        Layer(
            Attention(32, 2, 128, None),
            Experts(128, 6, 1856, "relu_squared", scoring="sigmoid", shared=GatedMLP(3712, "relu_squared")),
        ),
        NO_NETWORK,
        NO_NETWORK,
    ),
)
LATENT = replace(
    MAMBA2,
    hidden_size=4096,
    layers=(
        replace(MAMBA2.layers[0], ffn=replace(MAMBA2.ffn, count=512, top_k=22, size=2688, latent=1024)),
        NO_NETWORK,
    ),
)
NO_GATES = replace(
    LLAMA, family="nemotron_h", layers=(Layer(Attention(32, 8, 128, None), GatedMLP(21504, "relu_squared")), NO_NETWORK)
)
MANY_HEADS = replace(
    LLAMA,
    family="deepseek_v3",
    hidden_size=7168,
    layers=(
        Layer(
            LatentAttention(128, 1, 576, RopeConfig(), 64, own_dim=128, value_dim=128, query_latent=1536),
            Experts(256, 8, 2048, scoring="sigmoid", shared=GatedMLP(2048)),
        ),
    )
    * 2,
)
WIDE = replace(
    LLAMA,
    family="gemma4",
    hidden_size=2880,
    layers=(Layer(Attention(64, 8, 64, RopeConfig()), Experts(32, 4, 2880, "swiglu_clamped"), "both"),) * 2,
)
CONFIGS = {
    "8B": LLAMA,
    "gated": GATED,
    "embeddings of layers": replace(GEMMA, family="gemma4", layer_embedding=256),
    "odd": ODD,
    "side by side": replace(
        LLAMA,
        family="cohere",
        layers=tuple(replace(one, parallel=True) for one in LLAMA.layers),
        tied_head=True,
        centred=True,
    ),
    "norms behind": GEMMA,
    "experts and a shared network": SHARED,
    "experts": WIDE,
    "short convolutions": CONVOLUTIONS,
    "gated delta rules": DELTA_RULES,
    "delta rules by channel": CHANNEL_RULES,
    "Mamba 2, experts without gates": MAMBA2,
    "Mamba 2, experts of a latent size": LATENT,
    "Mamba 2, a wide network without a gate": NO_GATES,
    "latent vectors": MANY_HEADS,
}
TYPES = [("ring4", "ring3.5"), ("f16", "f16"), ("polarquant+dense", "polarquant+dense")]


PROMPTS = [
    ("8B", TYPES[0], 2048),
    ("odd", TYPES[2], 70),
    ("embeddings of layers", TYPES[1], 9000),
    ("experts and a shared network", TYPES[0], 9000),
    ("gated delta rules", TYPES[0], 2048),
    ("Mamba 2, experts without gates", TYPES[1], 70),
]


@mostly_slow("name, types, tokens", product(CONFIGS, TYPES, (70, 2048, 9000)), PROMPTS)
def test_prompt_bytes_bounds_the_peak_of_a_prompt(name: str, types: tuple[str, str], tokens: int) -> None:
    """Never more, and at least two thirds of it, since what is counted in vain is missing in the store. Logits of all
    rows of a block are what scoring asks for. Tokens, the model's sizes and the types decide together at which op of a
    prompt the peak is."""
    device, config = Counting(), CONFIGS[name]
    model = model_of(device, config, types, tokens + 64, 1)
    load = Load(config, model.store.shape.format(0), tokens, 1)
    prompt(model, 1)  # rotations are on the device
    before = device.begin()
    prompt(model, tokens)
    model.logits(device.empty((64, config.hidden_size), np.float32))
    counted = prompt_bytes(
        load, model.ops.cache_bytes(load.format)[1], model.ops.prefill_rows, model.ops.encoded_at_once
    )
    assert 2 / 3 * counted <= device.peak - before <= counted


@pytest.mark.parametrize(
    ("prompts", "tokens"),
    [
        (32, 63),  # has no complete block
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(32, 64), (16, 100), (15, 17), (1, 63)]),
    ],
)
def test_prompt_bytes_bounds_the_peak_of_a_batch(prompts: int, tokens: int) -> None:
    """However many layers' buffers there are at the same time: they have blocks that no prompt completes, too."""
    device, config = Counting(), llama(layers=24)
    model = model_of(device, config, TYPES[0], 2048 + 64, prompts)
    load = Load(config, model.store.shape.format(0), 2048, 1)
    prompt(model, 1)  # rotations are on the device
    before = device.begin()
    spans = model.store.open_batch([(model.store.new_sequence(), tokens) for _ in range(prompts)])
    forward_together(model, spans, [[1] * tokens] * prompts)
    model.store.commit_steps(spans)
    counted = prompt_bytes(
        load, model.ops.cache_bytes(load.format)[1], model.ops.prefill_rows, model.ops.encoded_at_once
    )
    assert device.peak - before <= counted


PACKED = ("8B", TYPES[0], "q4_k")
STEPS = [PACKED, *((name, TYPES[0], "f16") for name in ("odd", "embeddings of layers", "gated delta rules"))]


@mostly_slow("name, types, weights", [PACKED, *product(CONFIGS, TYPES, ["f16"])], STEPS)
def test_step_bytes_bounds_the_peak_of_steps(name: str, types: tuple[str, str], weights: str) -> None:
    """For every number of sequences that there may be; results and inputs included. A model's sizes and the types
    decide together which op of a step needs most."""
    device, most, config = Counting(), 70, CONFIGS[name]
    model = model_of(device, config, types, 64, most, weights)
    sequences = [prompt(model, 3) for _ in range(most)]
    for rows in (1, 2, 8, 9, 16, 17, 32, 33, 64, 70):
        load = Load(config, model.store.shape.format(0), 64, rows)
        device.recorded = 0
        spans = [model.store.open_step(sequence) for sequence in sequences[:rows]]
        plain = greedy(config.vocab_size)
        counted = step_bytes(load, device)
        for sampler_input in (plain, replace(plain, allowed=np.zeros(-(-config.vocab_size // 32), np.uint32))):
            model.step(StepBatch(spans, [1] * rows, [sampler_input] * rows)).wait()
            assert counted / 2 <= device.recorded <= counted
        for span in spans:
            model.store.abort(span)
        model.ops.reserve_workspace(load)
        assert device.aside == counted


# -- the plan --------------------------------------------------------------------------------------------------------

WEIGHTS = 8_030_261_248  # numbers of Llama 3 8B


@pytest.mark.parametrize("ctx_size", [8192, 65536, 131072])
def test_a_prompt_as_long_as_the_context_fits_beside_the_store(ctx_size: int) -> None:
    """On 24 GB, by what is known of the model alone: x, a layer's keys and values, cosines and sines of every token,
    gate and up of a chunk, logits of a step."""
    for parallel in (1, 8, 64):
        config = EngineConfig(ctx_size=ctx_size, parallel=parallel)
        ops, model = CudaOps(Counting(MEMORY)), LLAMA_8B
        shape = cache_shape(config, FULL_ENCODING, ops, model)
        plan = PlacementRequest(config, model, Sizes(2 * WEIGHTS)).plan(ops, shape, ops.memory_left(2 * WEIGHTS))
        heads, kv_heads, dim = model.attention.heads, model.attention.kv_heads, model.attention.head_dim
        token = 4 * model.hidden_size + 2 * kv_heads * dim * 2 + 4 * dim
        chunk = 2048 * (3 * 4 * model.ffn.size + 2 * 4 * heads * dim)
        work = plan.tokens * token + chunk + parallel * 4 * model.vocab_size
        free, _ = ops._device.memory()
        assert 2 * WEIGHTS + plan.bytes + work <= free, parallel
        assert ops.work_bytes(Load(model, shape.format(0), plan.tokens, parallel)) <= 1.25 * work, parallel
        # No room is left unused.
        assert plan.tokens == ctx_size or 2 * WEIGHTS + plan.bytes + 1.25 * work + GB > free, parallel
        assert plan.tokens >= min(ctx_size, 85_000), parallel


def test_a_short_context_leaves_more_memory_to_the_store() -> None:
    """Memory is kept free only for prompts that the context admits."""
    ops, model = CudaOps(Counting(MEMORY)), LLAMA_8B
    shape = cache_shape(EngineConfig(), FULL_ENCODING, ops, model)
    short, long = (ops.work_bytes(Load(model, shape.format(0), tokens, 8)) for tokens in (8192, 131072))
    assert short < 1.1 * GB < 3 * GB < long


def test_an_engine_sets_the_memory_of_its_steps_aside(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Counting()
    monkeypatch.setattr(assembly, "select", lambda *_: (CudaOps(device), ""))
    settings = {"block_size": 16, "ctx_size": 128, "parallel": 5, "calibration": False}
    with Engine.load(tiny_path, **settings) as engine:
        shape, config = engine.cache_shape, engine.model.config
        assert device.aside == step_bytes(Load(config, shape.format(0), engine.context, 5), device)


def test_the_plan_leaves_memory_for_activations() -> None:
    shape = CacheShape(64, (LayerShape(codecs.get("f16"), codecs.get("f16"), 8, 128),) * 4)
    least = plan_for_tokens(shape, 128, 1).bytes
    plan = plan_for_memory(shape, 4 * least, 100_000, 1, lambda tokens: least + 1000 * tokens)
    assert plan.bytes + least + 1000 * plan.tokens <= 4 * least
    following = plan_for_tokens(shape, plan.tokens + 64, 1)
    assert following.bytes + least + 1000 * following.tokens > 4 * least
    with pytest.raises(EngineError, match="0 B for the KV store is too little"):
        plan_for_memory(shape, 4 * least, 100_000, 1, lambda tokens: 5 * least)
