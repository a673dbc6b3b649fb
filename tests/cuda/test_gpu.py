"""Tests that need a GPU: CUDA graphs, long contexts, whole models, running out of memory.

The other tests of this folder run on a GPU as well where the environment has TESTS_GPU; these need one.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.bench.command import CacheType
from polarlm.bench.lab.gpu.attention import layer_format
from polarlm.bench.lab.gpu.cache import ALLOWED_ERROR, Content, SequenceBlocks, attention_error, fill, read_tokens
from polarlm.bench.lab.gpu.setup import CupyClock, Sizes
from polarlm.bench.random_weights import RandomWeights
from polarlm.engine import Engine, EngineError, SamplingParams
from polarlm.engine.backends.cuda.device import MOST_BATCHES, MOST_RECORDINGS
from polarlm.engine.backends.cuda.kv.cache import HostTable
from polarlm.engine.backends.cuda.multi_device.ops import MultiDeviceOps
from polarlm.engine.backends.cuda.ops import _UNCOUNTED_BYTES, CudaOps
from polarlm.engine.backends.kv import AttentionRule, KVLocation, SpanView
from polarlm.engine.model.batch import StepBatch
from polarlm.engine.model.forward import Transformer
from polarlm.engine.model.warm_up import recording_warm_ups
from polarlm.engine.sampling.sample import greedy
from polarlm.engine.state.store import SequenceKV
from polarlm.model_loaders import demo
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.user_dirs import cache_folder
from tests.bare import forward
from tests.cuda.emulated import open_device
from tests.cuda.gpu_sizes import SIZES
from tests.cuda.some_batches import batches_of
from tests.cuda.test_model_emulated import model_from, model_of, talk
from tests.cuda.test_packed_model import mixed_model
from tests.shared_data import shared

pytestmark = pytest.mark.skipif(
    not os.environ.get("TESTS_GPU"), reason="needs a GPU, and TESTS_GPU=1 in the environment"
)


# -- recorded work -------------------------------------------------------------------------------------------------


class Unrecorded(CudaOps):
    """Runs the work of a step every time, unrecorded."""

    def run_graph(self, key: Any, work: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        def there(host: Any) -> Any:
            if isinstance(host, HostTable):
                return replace(host, copies={self._device: self._device.from_host(host.table)})
            return self._device.from_host(np.ascontiguousarray(host))

        return work(*map(there, inputs))


def small_model(ops: CudaOps, types: tuple[str, str], kind: str = "llama_gqa_llama3_tied") -> Transformer:
    """kind: name of a fixture; Q4_K_M or bf16 for random weights."""
    room = 16 * (SIZES.prompt + SIZES.steps), 16
    if kind not in ("Q4_K_M", "bf16"):
        return model_of(ops, kind, types, room=room)
    config, mixed = mixed_model()
    source = mixed if kind == "Q4_K_M" else RandomWeights(config, lambda _: kind)
    return model_from(ops, config, source, types, room=room)


def steps(model: Transformer, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the steps of `count` sequences of different lengths, (steps, B), and the last logits (B, V) of
    the prompts and of the steps."""
    rng, store = np.random.default_rng(7), model.store
    sequences: list[SequenceKV] = []
    for index in range(count):
        ids = rng.integers(5, model.config.vocab_size, SIZES.prompt - 3 * index).tolist()
        sequences.append(store.new_sequence())
        span = store.open(sequences[-1], len(ids))
        hidden = forward(model, [span], ids)
        store.commit(span)
    logits = [model.logits(hidden[-1:])[0]]
    chosen, ids = [], [7] * count
    sampler_inputs = [greedy(model.config.vocab_size)] * count
    for _ in range(SIZES.steps):
        spans = [store.open_step(sequence) for sequence in sequences]
        ids = model.step(StepBatch(spans, ids, sampler_inputs)).wait()
        for span in spans:
            store.commit(span)
        chosen.append(ids)
    # One more through the store as it is now: what steps wrote shows in it.
    spans = [store.open_step(sequence) for sequence in sequences]
    logits += list(model.logits(forward(model, spans, ids)))
    return np.array(chosen), np.array(logits)


@pytest.mark.parametrize(
    ("types", "kind", "count"),
    [
        (("f16", "f16"), "llama_gqa_llama3_tied", 1),
        (("f16", "f16"), "Q4_K_M", 3),
        (("f16", "f16"), "bf16", 12),
        (("ring4", "ring3.5"), "llama_gqa_llama3_tied", 12),
        (("ring4", "ring3.5"), "Q4_K_M", 1),
        (("ring4", "ring3.5"), "bf16", 3),
    ],
)
def test_replayed_steps_equal_launched_steps(types: tuple[str, str], kind: str, count: int) -> None:
    """Across block ends and growing block tables, tokens and logits are bit-equal."""
    recorded, logits = steps(small_model(CudaOps(open_device()), types, kind), count)
    plain, plain_logits = steps(small_model(Unrecorded(open_device()), types, kind), count)
    np.testing.assert_array_equal(recorded, plain)
    np.testing.assert_array_equal(logits, plain_logits)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("kind", ["llama_gqa_linear", "packed"])
def test_replayed_batches_equal_launched_batches(kind: str, overlaps: bool) -> None:
    """Of about 50 rows, in the bucket of 64, with prompts that go on and steps."""
    from polarlm.engine.backends.cuda.device.cupy_device import CupyDevice

    device, types, room = CupyDevice(overlaps=overlaps), ("ring4", "ring3.5"), {"room": (256, 12), "more": 2560}

    def model() -> Transformer:
        ops = CudaOps(device)
        return (
            model_from(ops, *mixed_model(), types, **room) if kind == "packed" else model_of(ops, kind, types, **room)
        )

    recorded = batches_of(model())
    device.run_graph = lambda key, work, inputs: work(*map(device.from_host, inputs))
    np.testing.assert_equal(recorded, batches_of(model()))
    assert np.isfinite(np.concatenate(recorded)).all()


@pytest.mark.parametrize("kind", ["qwen3_5_tied", "nemotron_h_experts", "lfm2_tied"])
def test_replayed_steps_of_recurrent_layers_equal_launched_steps(kind: str) -> None:
    """Also steps of several rows, where some are dropped."""
    devices = (CudaOps(open_device()), Unrecorded(open_device()))
    recorded, plain = (talk(model_of(ops, kind, ("f16", "f16"))) for ops in devices)
    for logits, wanted in zip(recorded, plain, strict=True):
        np.testing.assert_array_equal(logits, wanted)
        assert np.isfinite(logits).all()


# Copies inside of a GPU and between two, of hidden states alone and of a recurrent state beside them.
@pytest.mark.parametrize("second", [0, 1])
@pytest.mark.parametrize(("kind", "counts"), [("llama_gqa_linear", (1, 1)), ("qwen3_5_tied", (2, 2))])
def test_devices_share_the_layers_of_a_model(kind: str, counts: tuple[int, int], second: int) -> None:
    """Two streams with recordings of their own, of one GPU or of two alike, give what one gives."""
    from polarlm.engine.backends.cuda.device import cupy_device

    if second >= cupy_device.device_count():
        pytest.skip("there is one GPU")
    first, *others = (CudaOps(cupy_device.open_device(number)) for number in (0, 0, second))
    if len({ops.name.split(" (cuda")[0] for ops in (first, *others)}) > 1:
        pytest.skip("the GPUs differ")
    wanted = talk(model_of(first, kind, ("ring4", "ring3.5")))
    np.testing.assert_equal(talk(model_of(MultiDeviceOps(others, counts), kind, ("ring4", "ring3.5"))), wanted)


@pytest.mark.parametrize("kept", [24, 2])
def test_sequences_may_join_and_leave_between_replays(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings for each number of sequences alternate; some are dropped and made again."""
    monkeypatch.setattr("polarlm.engine.backends.cuda.device.cupy_recording.MOST_RECORDINGS", kept)
    tokens = []
    for ops in (CudaOps(open_device()), Unrecorded(open_device())):
        model = small_model(ops, ("ring4", "ring3.5"))
        sequences = [model.store.new_sequence() for _ in range(4)]
        chosen: list[int] = []
        for turn in range(40):
            spans = [model.store.open_step(sequence) for sequence in sequences[: 1 + turn * 3 % 4]]
            sampler_inputs = [greedy(model.config.vocab_size)] * len(spans)
            chosen += model.step(StepBatch(spans, [5 + turn] * len(spans), sampler_inputs)).wait()
            for span in spans:
                model.store.commit(span)
        tokens.append(chosen)
    assert tokens[0] == tokens[1]


def test_the_memory_of_graphs_fits_into_what_is_not_counted() -> None:
    """Of as many recordings as are kept, of a model of 32 layers, beside the pools: half of it is for other things."""
    import cupy

    config = mixed_model()[0]
    config = replace(config, layers=config.layers[:1] * 32)
    ops = CudaOps(open_device())
    model = model_from(ops, config, RandomWeights.for_kind(config, "q4_k"), ("f16", "f16"), room=(1024, 16))
    calls = recording_warm_ups(model, 8)
    assert len(calls) == 2 * (4 + 4)  # batches, then steps, each of four numbers of rows

    def taken(calls: Sequence[Callable[[], None]]) -> int:
        """Bytes that these calls take for good, but for arrays."""
        sizes = []
        for some in ((), calls):
            for call in some:
                call()
            pools = cupy.get_default_memory_pool(), ops._device._recordings._memory
            sizes.append(cupy.cuda.runtime.memGetInfo()[0] + sum(pool.total_bytes() for pool in pools))
        return sizes[0] - sizes[1]

    for call in calls[::2]:  # compiles and allocates
        call()
    batches, steps = taken(calls[1:8:2]), taken(calls[9::2])
    all_kept = MOST_BATCHES // 4 * batches + MOST_RECORDINGS // 4 * steps
    print(
        f"graphs: {batches / 2**20:.1f} MiB of 4 batches, {steps / 2**20:.1f} of 4 steps, {all_kept / 2**20:.0f} of all"
    )
    assert all_kept <= _UNCOUNTED_BYTES // 2


# -- long contexts -------------------------------------------------------------------------------------------------

LONG = SIZES.long
SHAPE = Sizes(blocks=16)  # Llama-3-8B's
TYPES = ["f16", "ring4/ring3.5", "ring3/ring3.5", "ring5/ring4", "polarquant", "turbo4"]


def filled(cache_type: str, quantized: int, exact: int) -> tuple[CudaOps, Any, Any]:
    """Ops, their device, and a layer's cache full of random records."""
    device, config = open_device(), SHAPE.config
    ops = CudaOps(device)
    cache = ops.cache(layer_format(SHAPE, CacheType.read(cache_type), None, None), quantized, exact)
    content = Content.random(SHAPE.blocks, SHAPE.block_size, config.attention.kv_heads, config.attention.head_dim)
    fill(ops, CupyClock(), cache, content)
    return ops, device, cache


@pytest.mark.parametrize("cache_type", TYPES)
def test_one_token_attends_to_a_long_context(rng: np.random.Generator, cache_type: str) -> None:
    """Ragged sequences in one launch, every KV head, against float64 over what NumPy reads out of the records. Of some
    the newest complete blocks are in full precision."""
    config, n = SHAPE.config, SHAPE.block_size
    contexts, full = [LONG, LONG - n - 17, 2 * n + 1], [6, 2, 3]
    quantized = [(context - 1) // n + 1 - count for context, count in zip(contexts, full, strict=True)]
    ops, device, cache = filled(cache_type, sum(quantized), sum(full))
    ids, slots = (
        [part.tolist() for part in np.split(rng.permutation(sum(counts)), np.cumsum(counts)[:-1])]
        for counts in (quantized, full)
    )
    laid = [SequenceBlocks(*of) for of in zip(contexts, ids, slots, strict=True)]
    queries = rng.standard_normal((len(contexts), config.attention.heads, config.attention.head_dim), np.float32)
    spans = ops.spans([of.span(row, n) for row, of in enumerate(laid)], n)
    out = ops.to_host(
        ops.attention(ops.to_device(queries), cache, spans, AttentionRule(config.attention.head_dim**-0.5))
    )
    group = config.attention.heads // config.attention.kv_heads
    for row, of in enumerate(laid):
        for head in range(config.attention.kv_heads):
            mine = row, slice(head * group, (head + 1) * group)
            error = attention_error(device, cache, SHAPE.blocks, of, head, queries[mine], out[mine])
            assert error <= ALLOWED_ERROR


@pytest.mark.parametrize("cache_type", ["f16", "ring4/ring3.5", "polarquant"])
def test_a_prompt_attends_to_a_long_context(rng: np.random.Generator, cache_type: str) -> None:
    """New rows behind a sink and many quantized blocks: the first, the last and some between, of one KV head."""
    config, n, new = SHAPE.config, SHAPE.block_size, 1000
    complete = LONG // n - new // n - 1
    ops, device, cache = filled(cache_type, complete - 1, 2)
    of = SequenceBlocks(complete * n, rng.permutation(complete - 1).tolist(), [0, 0])
    buffer = ops.buffer(cache.format, new)
    start = complete * n
    span = SpanView(slice(0, new), start, KVLocation(buffer, 0), start, of.full[0], of.quantized, n)
    spans = ops.spans([span], n)
    k, v = (rng.standard_normal((new, config.attention.kv_heads, config.attention.head_dim), np.float32) for _ in "kv")
    queries = rng.standard_normal((new, config.attention.heads, config.attention.head_dim), np.float32)
    ops.append_kv(cache, spans, ops.to_device(k), ops.to_device(v))
    out = ops.to_host(
        ops.attention(ops.to_device(queries), cache, spans, AttentionRule(config.attention.head_dim**-0.5))
    )

    head, group = config.attention.kv_heads - 1, config.attention.heads // config.attention.kv_heads
    heads = slice(head * group, (head + 1) * group)
    old = [read_tokens(device, cache, side, SHAPE.blocks, of, head) for side in ("keys", "values")]
    keys, values = (np.concatenate([x, y[:, head]]) for x, y in zip(old, (k, v), strict=True))
    exact, rows = [], [0, 1, n - 1, n, 500, new - 1]
    for row in rows:
        seen = start + row + 1
        scores = queries[row, heads].astype(np.float64) @ keys[:seen].T * config.attention.head_dim**-0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        exact.append(weights / weights.sum(-1, keepdims=True) @ values[:seen])
    assert np.abs(out[rows, heads] - exact).max() <= ALLOWED_ERROR * np.abs(exact).max()


# -- whole models --------------------------------------------------------------------------------------------------

ANSWER, CONTEXT = 200, 256  # tokens


def stories() -> Path:
    return shared("models", "stories15M")


def demonstration() -> Path:
    try:
        file = cache_folder() / demo.FILE_NAME
    except LoadError as error:
        pytest.skip(f"needs the demonstration model: {error}")
    if not file.is_file():
        pytest.skip("needs the demonstration model in the cache folder: start the chat once")
    return file


@pytest.mark.parametrize(("find", "prompt"), [(stories, "Once upon a time"), (demonstration, "The old lighthouse")])
def test_the_text_equals_that_of_the_cpu(find: Callable[[], Path], prompt: str) -> None:
    """The GPU's own answer, fed to both: nearly every time the same token comes first.

    Weights are rounded to half precision, and so are K/V: two tokens that are nearly as likely may change places.
    """
    path = find()
    params = SamplingParams(max_tokens=ANSWER, temperature=0, repeat_penalty=1, ignore_eos=True)
    with Engine.load(path, device="cuda", cache_type="f16", ctx_size=CONTEXT) as engine:
        answer = engine.generate(prompt, params).token_ids
        bos = engine.model.tokenizer.bos_id
        ids = [*([] if bos is None else [bos]), *engine.tokenize(prompt), *answer]
        on_gpu = engine.score(ids, logits=True).logits
    with Engine.load(path, device="cpu", cache_type="f16", ctx_size=CONTEXT) as engine:
        on_cpu = engine.score(ids, logits=True).logits
    assert len(answer) == ANSWER
    assert (on_gpu.argmax(-1) == on_cpu.argmax(-1)).mean() >= 0.99
    # Steps chose the answer; scoring takes whole blocks at once.
    assert (on_gpu[-ANSWER - 1 : -1].argmax(-1) == np.array(answer)).mean() >= 0.99


# -- memory --------------------------------------------------------------------------------------------------------


@contextmanager
def no_more_memory() -> Iterator[None]:
    """A context in which the pool has nothing left and gets nothing new. Earlier tests may have left free pieces."""
    import cupy

    gc.collect()
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.get_limit()
    pool.set_limit(size=max(1, pool.total_bytes()))
    taken, size = [], pool.free_bytes()
    while size:
        try:
            taken.append(pool.malloc(size))
        except MemoryError:
            size //= 2
    try:
        yield
    finally:
        taken.clear()
        pool.set_limit(size=before)


def test_a_request_out_of_memory_fails_and_the_engine_goes_on(tiny_path: Path) -> None:
    params = SamplingParams(max_tokens=8, temperature=0)
    with Engine.load(tiny_path, device="cuda", cache_type="f16", ctx_size=256, kept_sequences=0) as engine:
        wanted = engine.generate(list(range(5, 25)), params).token_ids
        with no_more_memory(), pytest.raises(EngineError, match="There is not enough memory") as caught:
            engine.generate(np.resize(np.arange(5, 95), 200), params)
        assert caught.value.code == "out_of_memory"
        assert engine.generate(list(range(5, 25)), params).token_ids == wanted
