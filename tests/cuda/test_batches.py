"""Batches in buckets: rows that fill a batch up change no bit of the others' tokens, logits and K/V."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polarlm.bench.random_weights import RandomWeights
from polarlm.engine.backends.cuda import batches, launch_configs, packed, wide
from polarlm.engine.backends.cuda.batches import bucket
from polarlm.engine.backends.cuda.launch_configs import GEMV_ROWS, SMALL_ROWS
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.model.batch import StepBatch
from polarlm.engine.sampling.sample import SamplerInput, greedy
from polarlm.model_loaders import load_weights as open_weights
from tests.bare import forward, stepped
from tests.conftest import FIXTURES
from tests.cuda.emulated import open_device
from tests.cuda.test_model_emulated import model_from, model_of
from tests.cuda.test_sampler_inputs import everything

LENGTHS = [3, 40, 16, 1, 31]  # tokens of prompts; blocks have 16
COUNTS = [[1] * 5, [1, 1, 3], [3, 1, 5], [1] * 5]  # rows of each sequence in each step: of all, or of the last three


def test_a_bucket_takes_the_kernels_of_its_batches() -> None:
    """So the results of its rows do not depend on how many of them are empty."""

    def kernels(rows: int) -> list[object]:
        parts = [min(SMALL_ROWS, rows - first) for first in range(0, rows, SMALL_ROWS)]
        made: list[object] = [len(parts)]
        for part in parts:
            made.append(part > GEMV_ROWS)
            for out, width, machine in [(4096, 4096, (132, 228 << 10)), (640, 11008, (6, 100 << 10))]:
                if part <= GEMV_ROWS:
                    made.append(launch_configs.gemv(part, out, width, machine[0]))
                    made.append(packed.gemv_packed(part, *machine, (packed.PackedRows(out, 256, 148),)))
        made.append(wide.row_groups(rows))
        return made

    for rows in range(1, 300):
        assert rows <= bucket(rows) < max(rows + 16, 4 / 3 * rows + 2)
        assert bucket(bucket(rows)) == bucket(rows)
        assert kernels(rows) == kernels(bucket(rows))
    assert len({bucket(rows) for rows in range(1, 65)}) == 10


def run(ops: CudaOps, types: tuple[str, str], sampler_inputs: Sequence[Sequence[SamplerInput]]) -> list[object]:
    """Steps of all sequences, of the last three, and of all again → tokens, logits and the bytes of all K/V.

    sampler_inputs: for each step the inputs of its first rows, which repeat."""
    config, source, _ = open_weights(FIXTURES / "qwen2_mixed_windows")
    source.close()
    # A library may multiply another number of rows in another order; our kernels of packed weights do not.
    model, seen = model_from(ops, config, RandomWeights(config, lambda _: "q8_0"), types), []
    rng, vocabulary = np.random.default_rng(8), model.config.vocab_size
    for layer in range(len(model.config.layers)):
        cache = model.store.cache(layer)
        for pool in (cache.keys.quantized, cache.values.quantized, *cache.full):
            pool[...] = 0  # a GPU's new memory holds anything
    sequences = [model.store.new_sequence() for _ in LENGTHS]
    for sequence, length in zip(sequences, LENGTHS, strict=True):
        span = model.store.open(sequence, length)
        forward(model, [span], rng.integers(5, vocabulary, length).tolist())
        model.store.commit(span)
    for counts, row_inputs in zip(COUNTS, sampler_inputs, strict=True):
        rows, batch = sum(counts), sequences[-len(counts) :]
        spans = [model.store.open_step(sequence, count) for sequence, count in zip(batch, counts, strict=True)]
        each = [row_inputs[row % len(row_inputs)] for row in range(rows)]
        seen += stepped(model, spans, rng.integers(5, vocabulary, rows).tolist(), each)
        model.store.commit_steps(spans)
    for layer in range(len(model.config.layers)):
        cache = model.store.cache(layer)
        seen += [ops._device.to_host(pool) for pool in (cache.keys.quantized, cache.values.quantized, *cache.full)]
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("types", "lists"), [(("ring4", "ring3.5"), True), (("polarquant+dense", "f16"), False)])
def test_empty_rows_change_nothing(monkeypatch: pytest.MonkeyPatch, types: tuple[str, str], lists: bool) -> None:
    """Signed Hadamard rotations and dense ones, two groups of layers, blocks that fill, one and several rows."""
    vocabulary = 96
    plain = [greedy(vocabulary)] * len(LENGTHS)
    full = [everything(vocabulary, number) for number in range(len(LENGTHS))]
    full[1] = replace(full[1], sampling=replace(full[1].sampling, temperature=0.9))
    sampler_inputs = (
        [full, [replace(sampler_input, logprobs=2) for sampler_input in full], full, plain] if lists else [plain] * 4
    )
    rows: list[int] = []

    def watched() -> CudaOps:
        device = open_device(checked=False)
        run_graph = device.run_graph

        def noted(key: Any, work: Any, inputs: Sequence[np.ndarray]) -> Any:
            rows.append(len(inputs[0]))
            return run_graph(key, work, inputs)

        device.run_graph = noted  # type: ignore[method-assign]
        return CudaOps(device)

    padded = run(watched(), types, sampler_inputs)
    monkeypatch.setattr(batches, "bucket", lambda rows: rows)
    wanted = run(watched(), types, sampler_inputs)
    assert rows == [8, 8, 12, 8, 5, 5, 9, 5]
    np.testing.assert_equal(padded, wanted)


@pytest.mark.parametrize("model", ["llama_gqa_linear", "qwen3_5_tied"])
def test_few_recordings_serve_steps_of_several_rows(model: str) -> None:
    """Launches depend on the most rows of a sequence, which the shapes of inputs do not show. Recurrent layers' tables
    are not padded."""
    device, seen = open_device(checked=False), list[Any]()
    ops = CudaOps(device)

    def noted(key: Any, work: Any, inputs: Sequence[Any]) -> Any:
        seen.append((max(key[2:]), len(inputs[0])))
        return np.zeros((len(inputs[0]),)), np.zeros((len(inputs[0]), 96))

    device.run_graph = noted  # type: ignore[method-assign]
    ops.fetch_tokens = lambda chosen, logits, inputs: seen[-1] + logits.shape[:1]  # type: ignore[method-assign]
    transformer = model_of(ops, model, ("f16", "f16"))
    plain = greedy(transformer.config.vocab_size)

    def step(*counts: int) -> Any:
        spans = [transformer.store.open_step(transformer.store.new_sequence(), count) for count in counts]
        made = transformer.step(StepBatch(spans, [7] * sum(counts), [plain] * sum(counts))).wait()
        for span in spans:
            transformer.store.abort(span)
        return made

    assert step(1, 1, 1) == (1, 4, 3)
    if model == "qwen3_5_tied":
        assert step(5, 1, 1) == (5, 7, 7)
        return
    assert step(5, 1, 1) == (*step(1, 6, 1)[:2], 7) == (8, 8, 7)
    assert step(3) == (4, 4, 3)
    assert step(13) == (*step(16)[:2], 13) == (16, 16, 13)
    assert step(2, 2) == (2, 4, 4)
