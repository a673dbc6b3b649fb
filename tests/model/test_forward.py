"""The forward pass against transformers in float32, for every family and kind of RoPE."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from polarlm.engine.backends.kv import FilledBlocks
from polarlm.engine.backends.numpy.attention import read_blocks
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.errors import EngineError
from polarlm.engine.loading.calibration import calibrate
from polarlm.engine.model.batch import StepBatch
from polarlm.engine.model.decoder import cut
from polarlm.engine.model.forward import Transformer
from polarlm.engine.model.score import score
from polarlm.engine.state.store import Span
from tests.bare import bare_model, feed, forward, log_softmax, prefill_logits, read_model, spread, step_logits, stepped
from tests.conftest import FIXTURES

# Tolerance of logits, as a part of their spread. Products of one row and of several differ in their last bits, so a
# number at the edge between two halves, or two codes, may be stored as the other one. Halves are 2**-11 apart.
ROUNDED = 2**-11

MODELS = sorted(path.name for path in FIXTURES.iterdir())


# A model with windows, one with experts, one with shared keys and values, and one with recurrent layers.
SOME = ["gemma3_tied", "qwen3_moe_normed", "gemma4_shared_kv", "qwen3_5_tied"]


@pytest.fixture(params=SOME)
def fixture(request: pytest.FixtureRequest):
    return read_fixture(request.param)


def read_fixture(name: str):
    path: Path = FIXTURES / name
    reference = np.load(path / "reference.npz")
    return *read_model(path), reference["ids"].tolist(), reference["logits"]


def scored(model, ids, **options):
    return score(model, ids, logits=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_family_has_the_logits_of_transformers(name: str, monkeypatch) -> None:
    """Each family has code of its own: as a prompt, in chunks, over a cache and in steps; a second turn equals them."""
    read = read_fixture(name)
    test_score_equals_a_loop_of_steps(read, "polarquant")
    test_rows_of_a_step_get_the_logits_of_a_prompt(read, ("polarquant", "ring4"), 8)
    test_chunk_size_never_changes_a_result(read, monkeypatch)


def test_logits_are_those_of_transformers() -> None:
    for name in MODELS:
        config, weights, ids, reference = read_fixture(name)
        logits = prefill_logits(bare_model(config, weights), ids)
        assert np.abs(logits - reference).max() <= 1e-3 * spread(reference), name
        assert (logits.argmax(-1) == reference.argmax(-1)).all(), name


def test_chunk_size_never_changes_a_result(fixture, monkeypatch) -> None:
    config, weights, ids, reference = fixture
    for chunk in (1, 7):
        monkeypatch.setattr(NumpyOps, "prefill_rows", chunk)
        logits = prefill_logits(bare_model(config, weights, ("polarquant", "polarquant")), ids)
        assert np.abs(logits - reference).max() <= 1e-3 * spread(reference)


@pytest.mark.parametrize("type", ["f16", "polarquant"])
def test_score_equals_a_loop_of_steps(fixture, type: str) -> None:
    config, weights, ids, reference = fixture
    by_steps, by_chunks = (bare_model(config, weights, (type, type), block_size=8) for _ in range(2))
    step_blocks, chunk_blocks = recorded(by_steps), recorded(by_chunks)
    steps, result = step_logits(by_steps, ids), scored(by_chunks, ids)
    # Up to the first block with other codes the logits are equal but for the halves, which give f16 other codes, too.
    flipped, share = first_difference(step_blocks, chunk_blocks)
    equal = slice(0, None if flipped is None else (flipped + 1) * 8)
    assert share <= 0.1
    assert np.abs(result.logits[equal] - steps[equal]).max() <= ROUNDED * spread(reference)
    logprobs = np.take_along_axis(log_softmax(result.logits[:-1]), np.array(ids[1:])[:, None], 1)[:, 0]
    np.testing.assert_allclose(result.logprobs, logprobs, atol=1e-5)


Blocks = list[list[np.ndarray]]


def recorded(model: Transformer) -> dict[int, Blocks]:
    """A dict that gets, per layer, all arrays of every block that is encoded from now on, in order."""
    layers = {id(model.store.cache(layer)): layer for layer in range(len(model.config.layers))}
    blocks: dict[int, Blocks] = {layer: [] for layer in layers.values()}
    encode = model.store.ops.encode_blocks

    def encode_and_record(filled: Sequence[FilledBlocks]) -> None:
        encode(filled)
        for caches, ids, _ in filled:
            for cache in caches:
                arrays = [*cache.k.values(), *cache.v.values(), *cache.mean.values()]
                blocks[layers[id(cache)]] += [[array[:, block].copy() for array in arrays] for block in ids]

    model.store.ops.encode_blocks = encode_and_record
    return blocks


def first_difference(a: dict[int, Blocks], b: dict[int, Blocks]) -> tuple[int | None, float]:
    """The number of the first block whose codes differ in any layer, and the share of its values that differ.

    All later blocks may differ a little, because attention has read that one.
    """
    for number in range(max(map(len, a.values()))):
        pairs = [pair for layer in a if a[layer] for pair in zip(a[layer][number], b[layer][number], strict=True)]
        if different := sum(int((x != y).sum()) for x, y in pairs):
            return number + 1, different / sum(x.size for x, _ in pairs)  # block 0 is never encoded
    return None, 0.0


def test_every_token_coded_reads_each_block_as_it_is_stored(fixture) -> None:
    """The last block's tokens read the codes that a later token reads."""
    config, weights, ids, _ = fixture
    model = bare_model(config, weights, ("ring3", "ring3"), block_size=16)
    store, kv, seen = model.store, model.store.new_sequence(), {}
    round_trip = store.round_trip

    def watched(layer, span):
        round_trip(layer, span)
        if layer in config.attentions:
            seen[layer] = [x[:, :16].copy() for x in span.reservations[store.group_of(layer)].buffer]

    store.round_trip = watched
    feed(model, kv, ids[:32])
    feed(model, kv, ids[32:48], round_trip=True)
    for layer, (k, v) in seen.items():
        cache, table = store.cache(layer), kv.tables[store.group_of(layer)]
        stored_k, stored_v, mean = read_blocks(cache, np.array(table.quantized[-1:]))
        np.testing.assert_allclose(k, stored_k + (0 if mean is None else mean), atol=1e-6)
        np.testing.assert_allclose(v, stored_v, atol=1e-6)
    assert set(seen) == set(config.attentions)


# For three sequences, by rounds: the rows of a step, and how many of them are kept.
ROUNDS = [((5, 1, 3), (2, 1, 3)), ((2, 9, 1), (2, 1, 0)), ((16, 12, 8), (9, 12, 4)), ((1, 1, 1), (1, 1, 1))]


@pytest.mark.parametrize(("types", "block_size"), [(("f16", "f16"), 64), (("polarquant", "ring4"), 8)])
def test_rows_of_a_step_get_the_logits_of_a_prompt(fixture, types: tuple[str, str], block_size: int) -> None:
    """With other sequences in the step, across ends of blocks, and after rows that were not kept."""
    config, weights, ids, reference = fixture
    model, other = (bare_model(config, weights, types, block_size=block_size) for _ in range(2))
    sequences, prompts = ([one.store.new_sequence() for _ in range(3)] for one in (model, other))
    for kv, prompt, length in zip(sequences, prompts, (20, 33, 5), strict=True):
        feed(model, kv, ids[:length])
        feed(other, prompt, ids[:length])
    for counts, kept in ROUNDS:
        if any(group.is_sparse for group in model.store.groups):  # it takes rows of the current block alone
            counts = [min(count, model.store.rows_of_block(kv)) for kv, count in zip(sequences, counts, strict=True)]
            kept = [min(most, count) for most, count in zip(kept, counts, strict=True)]
        spans = [model.store.open_step(kv, count) for kv, count in zip(sequences, counts, strict=True)]
        rows = [drafted(ids, span, keep) for span, keep in zip(spans, kept, strict=True)]
        together = stepped(model, spans, [token for span_rows in rows for token in span_rows])[0]
        assert model.store.commit_steps(spans, kept) == {}
        alone = []
        for prompt, span_rows, keep in zip(prompts, rows, kept, strict=True):
            span = other.store.open(prompt, len(span_rows), as_steps=True)
            alone.append(other.logits(forward(other, [span], span_rows)))
            other.store.abort(span)
            if keep:
                feed(other, prompt, span_rows[:keep], as_steps=True)
        assert np.abs(together - np.concatenate(alone)).max() <= ROUNDED * spread(reference)
    assert [kv.length for kv in sequences] == [kv.length for kv in prompts]


def drafted(ids: Sequence[int], span: Span, kept: int) -> list[int]:
    """The rows of a span: the next of `ids`, which will be kept, then wrong tokens."""
    return [*ids[span.start : span.start + kept], *[7] * (span.count - kept)]


@pytest.mark.parametrize("beyond", [-1, 96])
def test_an_id_without_a_row_is_an_error(beyond: int) -> None:
    """A kernel would read foreign memory, and its statistics would be kept."""
    config, weights = read_model(FIXTURES / "llama_gqa_linear")
    with pytest.raises(EngineError, match=f"no row {beyond} in a table of 96"):
        calibrate(NumpyOps(), config, weights, [5] * 15 + [beyond], 8)
    with pytest.raises(EngineError, match=f"no row {beyond} in a table of 96"):
        bare_model(config, weights).step(StepBatch([], [beyond], [])).wait()


@pytest.mark.parametrize("step", [1, 2, 3, 16])
def test_no_prompt_is_cut_so_that_a_single_row_is_left(step: int) -> None:
    """Kernels of steps would compute it, and the size of a unit would change a result."""
    for count in range(1, 70):
        units = cut(count, step)
        assert [row for unit in units for row in range(count)[unit]] == [*range(count)]
        sizes = [unit.stop - unit.start for unit in units]
        assert max(sizes) <= step
        assert step < 3 or min(sizes) > 1 or sizes == [1]
