"""A whole model through the CUDA backend on the emulated device: prompts, second turns and steps, against NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Engine, PromptOptions, SamplingParams, codecs
from polarlm.engine.backends.cuda.launch_configs import GEMV_ROWS
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.numpy.rows import rms_norm
from polarlm.engine.backends.ops import PLAIN, Fusion, Ops
from polarlm.engine.loading import assembly
from polarlm.engine.model import prompt_readers
from polarlm.engine.model.forward import Transformer
from polarlm.engine.model.weights import load_weights
from polarlm.engine.quantization.conditioning import Conditioning, Scale
from polarlm.engine.state.layer_shapes import LayerShape, SharedShape
from polarlm.engine.state.plan import plan_for_tokens
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.state.store import KVStore
from polarlm.engine.weight_formats import Matrix, StoredMatrix
from polarlm.model_loaders import ModelConfig, WeightSource
from polarlm.model_loaders import load_weights as open_weights
from tests.adapters import ALL, changed_model, random_changes, write_peft
from tests.bare import forward, shape_of, stepped
from tests.conftest import FIXTURES
from tests.cuda.emulated import open_device
from tests.cuda.formats import read, store
from tests.tiny import load_tiny, make_model
from tests.weights import matrix

N = 16  # tokens of a block


class SameWeights(NumpyOps):
    """NumPy with the weights of the device, rounded as they are there."""

    def __init__(self, device: CudaOps):
        super().__init__()
        self._device = device
        self.kind = "__half"

    def load(self, matrices: Sequence[StoredMatrix]) -> tuple[Matrix, ...]:
        held = self._device.load(matrices)
        self.kind = {"f16": "__half", "bf16": "__nv_bfloat16"}.get(held[0].format.name, self.kind)
        return (matrix(np.concatenate([self._device.rows(part) for part in held])),)

    def load_experts(self, matrices: Sequence[Sequence[StoredMatrix]]) -> tuple[Matrix, ...]:
        return tuple(matrix(self._device.rows(part)) for part in self._device.load_experts(matrices))


class Rounded(SameWeights):
    """NumPy with what the kernels round: queries, keys and values to half precision, and for products with the model's
    matrices the other factor to the type of the weights; to bfloat16 only if there are more rows than gemv takes."""

    def append_kv(self, cache, spans, k, v) -> None:
        super().append_kv(cache, spans, halves(k), halves(v))

    def attention(self, q, cache, spans, rule) -> np.ndarray:
        return super().attention(halves(q), cache, spans, rule)

    def linear(self, x, w, fusion=PLAIN, residual=None) -> np.ndarray:
        x = x if fusion.norm is None else rms_norm(x, *fusion.norm)
        if len(x) > GEMV_ROWS or self.kind == "__half":
            x = read(store(x, self.kind), self.kind)
        return super().linear(x, w, fusion._replace(norm=None), residual)

    def experts(self, x, routing, network, residual=None, adapters=None) -> np.ndarray:
        norm, activation, _ = network.fusion
        x = x if norm is None else rms_norm(x, *norm)
        x = read(store(x, self.kind), self.kind)
        return super().experts(x, routing, network._replace(fusion=Fusion(activation=activation)), residual, adapters)


def halves(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)


def model_of(ops: Ops, fixture: str, types: tuple[str, str], **more: Any) -> Transformer:
    config, source, _ = open_weights(FIXTURES / fixture)
    model = model_from(ops, config, source, types, **more)
    source.close()
    return model


def model_from(
    ops: Ops,
    config: ModelConfig,
    source: WeightSource,
    types: tuple[str, str],
    *,
    room: tuple[int, int] = (256, 4),
    more: int = 0,
) -> Transformer:
    """A model whose store has room for so many tokens and sequences, and for `more` tokens of others, in blocks of N
    tokens."""
    weights = load_weights(ops, config, source)
    k, v = (codecs.get(name) for name in types)
    mean_bits = 0 if types[0] == "f16" else 8
    layers = tuple(shape_of(layer.mixer, k, v, mean_bits) for layer in config.layers)
    conditioning = []
    for layer in layers:
        if not isinstance(layer, LayerShape | SharedShape):
            conditioning.append(Conditioning())
            continue
        d, kv_heads = layer.head_dim, layer.kv_heads
        halves = np.linspace(0.5, 2, kv_heads * d // 2, dtype=np.float32).reshape(kv_heads, d // 2)
        factors = np.exp2(np.arange(kv_heads, dtype=np.float32) - 2)
        scale = Scale(np.concatenate([halves, halves], axis=1), factors) if mean_bits else None
        conditioning.append(Conditioning(k.rotation(d), v.rotation(d), scale))
    store = KVStore(ops, plan_for_tokens(CacheShape(N, layers), room[0], 2 * room[1]).extend(0, more), conditioning)
    return Transformer(ops, config, weights, store)


class Talk:
    """Sequences of a model and the logits that it gave for them."""

    def __init__(self, model: Transformer, count: int = 1):
        self.model = model
        self.sequences = [model.store.new_sequence() for _ in range(count)]
        self.logits: list[np.ndarray] = []

    def prompt(self, ids: Sequence[int], outputs: int | None = None, index: int = 0) -> None:
        span = self.model.store.open(self.sequences[index], len(ids))
        hidden = forward(self.model, [span], ids, outputs)
        self.model.store.commit(span)
        self.logits.append(self.model.logits(hidden))

    def step(self, ids: Sequence[int], counts: Sequence[int] | None = None, kept: int | None = None) -> list[int]:
        """One token of each of the first sequences, or `counts`; the logits are those that tokens were chosen from.

        kept: of the rows of each sequence, if not all.
        """
        counts = counts or [1] * len(ids)
        spans = [self.model.store.open_step(*of) for of in zip(self.sequences, counts, strict=False)]
        logits, chosen = stepped(self.model, spans, ids)
        self.model.store.commit_steps(spans, [kept] * len(spans))
        self.logits.append(logits)
        return chosen


def talk(model: Transformer, seed: int = 4) -> list[np.ndarray]:
    """A prompt, a second turn whose last row alone is looked at, steps over a block's end, and steps in company."""
    ids = np.random.default_rng(seed).integers(5, 96, 150).tolist()
    dialogue = Talk(model, 2)
    dialogue.prompt(ids[:70])
    dialogue.prompt(ids[70:94], outputs=1)
    for token in ids[94:98]:
        dialogue.step([token])
    dialogue.prompt(ids[98:128], index=1)
    for pair in np.reshape(ids[128:136], (-1, 2)).tolist():
        dialogue.step(pair)
    dialogue.step(ids[136:142], [4, 2], kept=2)
    dialogue.step(ids[138:150], [2, 10])
    return dialogue.logits


def close(logits: list[np.ndarray], exact: list[np.ndarray], rounded: list[np.ndarray]) -> None:
    """As near to NumPy's float32 as NumPy with the kernels' roundings is, times four: they round in other places as
    well, such as the weights of tokens. Where a rounding turns a vector over the edge of its code is a matter of luck,
    so that the worst of all outputs is what counts."""
    spread = max(wanted.max() - wanted.min() for wanted in exact)
    rounding = max(np.abs(half - wanted).max() for half, wanted in zip(rounded, exact, strict=True))
    allowed = 4 * max(rounding, 2.0**-11 * spread)
    worst = [float(np.abs(ours - wanted).max()) for ours, wanted in zip(logits, exact, strict=True)]
    assert max(worst) <= allowed, f"off by {worst}, allowed are {allowed}, of {spread}"
    assert allowed <= spread / 20, "the comparison says nothing"


# Steps of several rows, where some are dropped, and second turns; `test_family_scores` has every family.
CASES = [
    ("qwen2_mixed_windows", ("ring4", "ring3.5")),
    ("qwen3_qk_norm_tied", ("polarquant", "polarquant")),
    ("gemma2_mqa", ("ring4", "ring3.5")),
    ("gemma4_experts_beside", ("f16", "f16")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("fixture", "types"), CASES)
def test_logits_equal_those_of_numpy(fixture: str, types: tuple[str, str]) -> None:
    device = CudaOps(open_device(checked=False))
    backends = device, SameWeights(device), Rounded(device)
    close(*(talk(model_of(ops, fixture, types)) for ops in backends))


def test_a_prompt_is_read_as_on_the_cpu(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its embeddings and the log-probabilities of its tokens, a few rows at a time."""
    monkeypatch.setattr(prompt_readers, "_ROWS", 20)
    vectors, logprobs = [], []
    for ops in (CudaOps(open_device(checked=False)), NumpyOps()):
        monkeypatch.setattr(assembly, "select", lambda device, threads, ops=ops: (ops, ""))
        with Engine.load(tiny_path, block_size=N, ctx_size=128, calibration=False) as engine:
            assert ops.name in engine.fit_line()
            vectors += [engine.embed(range(5, 60), pooling).vector for pooling in ("mean", "last")]
            tokens = engine.generate(range(5, 60), SamplingParams(max_tokens=0, prompt_logprobs=2)).prompt_logprobs
            logprobs.append([token.logprob for token in tokens])
    for index in (0, 1):
        np.testing.assert_allclose(vectors[index], vectors[index + 2], atol=0.01)
    np.testing.assert_allclose(logprobs[0], logprobs[1], atol=0.05)


@pytest.mark.slow
def test_rows_of_a_step_have_adapters_of_their_own(tmp_path: Path) -> None:
    """Three requests, one without an adapter: steps are recorded, and their tables are filled up to a bucket. The last
    one's adapter is loaded while the others run."""
    (tmp_path / "base").mkdir()
    base = make_model(tmp_path / "base")
    kept: dict[str, Any] = {"device": "cpu", "block_size": N, "cache_type": "f16", "calibration": False}
    prompt, wanted, lora = [5 + 7 * i % 90 for i in range(20)], [], {}
    for name, rank, modules in (("", 0, ()), ("a", 5, ALL), ("b", 16, ("q_proj", "down_proj"))):
        changes = random_changes(base, rank, rank, modules) if name else {}
        if name:
            lora[name] = str(write_peft(tmp_path / name, changes, 2 * rank))
        with load_tiny(changed_model(tmp_path / f"changed{name}", base, changes, 2), ops=NumpyOps(), **kept) as engine:
            params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=5)
            wanted.append(engine.generate(prompt, params))
    later = lora.pop("b")
    with load_tiny(base, ops=CudaOps(open_device()), lora=lora, **kept) as engine:
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=5)
        streams = [engine.stream(prompt, params, PromptOptions(lora=name)) for name in ("", *lora)]
        streamed = [[one.logprob for one in next(stream).logprobs] for stream in streams]
        engine.load_adapter("b", later)
        streams.append(engine.stream(prompt, params, PromptOptions(lora="b")))
        streamed.append([])
        for _ in range(5):
            for number, stream in enumerate(streams):
                streamed[number] += [one.logprob for one in getattr(next(stream, None), "logprobs", ())]
    for logprobs, one in zip(streamed, wanted, strict=True):
        np.testing.assert_allclose(logprobs, [token.logprob for token in one.logprobs], atol=0.02)


@pytest.mark.slow
def test_adapters_come_and_go_between_steps_that_have_begun(tmp_path: Path) -> None:
    """A step that has begun for the token before it is computed again, and draws the same."""
    (tmp_path / "base").mkdir()
    base = make_model(tmp_path / "base")
    path = write_peft(tmp_path / "a", random_changes(base, 5, 5, ("q_proj", "down_proj")), 10)
    kept: dict[str, Any] = {"device": "cpu", "block_size": N, "cache_type": "f16", "calibration": False}
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=7, ignore_eos=True)
    answers = []
    for changes in (False, True):
        with load_tiny(base, ops=CudaOps(open_device()), **kept) as engine:
            stream, tokens, begun = engine.stream(range(5, 25), params), [], []
            for number, chunk in enumerate(stream):
                tokens += chunk.token_ids
                begun.append(engine._runner._batches.next_step is not None)
                if changes and number == 2:
                    engine.load_adapter("a", path)
                    assert engine._runner._batches.next_step is None
                if changes and number == 5:
                    engine.unload_adapter("a")
            assert begun[2]
            answers.append(tokens)
    assert answers[0] == answers[1]
    assert len(answers[0]) == 12
