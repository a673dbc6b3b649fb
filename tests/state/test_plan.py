"""The plan is the largest that fits, and has the bytes of the arrays."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polarlm.engine import EngineError, codecs
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.config import format_bytes, parse_size
from polarlm.engine.loading.assembly import fit_line
from polarlm.engine.quantization.conditioning import Conditioning
from polarlm.engine.state.layer_shapes import LayerShape
from polarlm.engine.state.plan import StorePlan, add_kept, f16_tokens, plan_for_memory, plan_for_tokens
from polarlm.engine.state.recurrent.conv_inputs import ConvShape
from polarlm.engine.state.recurrent.delta import DeltaShape
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.state.store import KVStore
from polarlm.model_loaders.config import GatedDelta
from tests.state.fed import plan_for_sequences
from tests.tiny import PLAIN, load_tiny

codec_names = st.sampled_from(["f16", "polarquant", "polarquant+dense"])
windows = st.one_of(st.none(), st.integers(1, 300))


@st.composite
def shapes(draw, windows=windows) -> CacheShape:
    means = st.sampled_from([0, 8, 16])
    names = codec_names.map(codecs.get)
    heads = draw(st.sampled_from([(st.integers(1, 4), st.sampled_from([8, 48, 64])), (st.just(2), st.just(64))]))
    layer = st.builds(LayerShape, names, names, *heads, means, windows)
    return CacheShape(
        block_size=draw(st.sampled_from([4, 8, 64])),
        layers=tuple(draw(st.lists(layer, min_size=1, max_size=5))),
    )


def sequences_of(plan: StorePlan) -> int:
    """The number of sequences that a plan has full-precision slots for."""
    return next(n for n in range(1, 100) if plan_for_tokens(plan.shape, 0, n).full_slots == plan.full_slots)


@given(shapes(), st.integers(1, 1 << 24), st.integers(1, 5000), st.integers(1, 5))
def test_the_plan_is_the_longest_sequence_that_fits(shape, memory, max_tokens, sequences) -> None:
    assume(max_tokens >= 2 * shape.block_size)
    if plan_for_tokens(shape, 2 * shape.block_size, 1).bytes > memory:
        with pytest.raises(EngineError, match=re.escape(format_bytes(memory))) as raised:
            plan_for_memory(shape, memory, max_tokens, sequences)
        assert raised.value.code == "out_of_memory"
        return
    plan = plan_for_memory(shape, memory, max_tokens, sequences)
    assert plan.bytes <= memory
    assert 1 <= sequences_of(plan) <= sequences
    assert plan == plan_for_tokens(shape, plan.tokens, sequences_of(plan))
    one_more = plan_for_tokens(shape, plan.tokens + 1, sequences_of(plan))
    assert plan.tokens == max_tokens or one_more.bytes > memory


RECURRENT = DeltaShape(GatedDelta(1, 2, 4, 3, 3))


@pytest.mark.parametrize("more_layers", [(), (ConvShape(16, 3), RECURRENT)])
@given(shapes(), st.integers(1, 1 << 24), st.integers(1, 500), st.integers(1, 300))
def test_memory_that_is_left_is_filled_to_the_last_block(more_layers, shape, memory, tokens, each) -> None:
    """A token more would need a block that does not fit, and so would the slots of half a sequence more."""
    shape = replace(shape, layers=(*shape.layers, *more_layers))
    one = plan_for_tokens(shape, tokens, 1)
    plan = add_kept(one, memory, each)
    if one.bytes > memory:
        assert plan == one
        return

    def larger(more: int, slots: int) -> StorePlan:
        """The plan with blocks for `more` tokens besides the context, of sequences that are no longer."""
        whole, rest = divmod(more, tokens)
        beside = shape.more_blocks(one.full_slots, slots)
        own = shape.quantized_blocks(tokens), shape.quantized_blocks(rest), beside
        blocks = tuple((1 + whole) * a + b + c for a, b, c in zip(*own, strict=True))
        return replace(one, quantized_blocks=blocks, more_slots=slots, more_tokens=more)

    slots = plan.more_slots
    assert plan == larger(plan.more_tokens, slots)
    assert plan.bytes <= memory
    assert plan.capacity == tokens + plan.more_tokens
    if larger(plan.more_tokens + tokens, slots).bytes > plan.bytes:  # tokens take blocks
        assert larger(plan.more_tokens + 1, slots).bytes > memory
    assert plan.more_tokens >= each * (slots // 2) - (each + 1) // 2
    assert larger(each * (slots // 2 + 1), slots + 2).bytes > memory


@given(shapes(), st.integers(0, 600), st.integers(1, 5))
def test_bytes_are_those_of_the_arrays(shape, tokens, sequences) -> None:
    plan = plan_for_tokens(shape, tokens, sequences)
    store = KVStore(NumpyOps(1), plan, [Conditioning()] * len(shape.layers))
    allocated = 0
    for layer in range(len(shape.layers)):
        cache = store.cache(layer)
        arrays = [*cache.k.values(), *cache.v.values(), *cache.mean.values(), cache.full_k, cache.full_v]
        allocated += sum(array.nbytes for array in arrays)
    assert plan.bytes == allocated


@given(shapes(), st.integers(1, 400), st.integers(1, 4))
def test_a_plan_for_sequences_holds_all_of_them_at_once(shape, tokens, count) -> None:
    """Prompts in two parts, one after the other, then a step of all."""
    few_heads = replace(shape, layers=tuple(replace(layer, kv_heads=1, head_dim=8) for layer in shape.layers))
    plan = plan_for_sequences(few_heads, tokens, count)
    assert plan.sequences(tokens) == count
    store = KVStore(NumpyOps(1), plan, [Conditioning()] * len(few_heads.layers))
    sequences = [store.new_sequence() for _ in range(count)]
    for part in (tokens // 2, tokens - 1 - tokens // 2):
        for sequence in sequences:
            if part > 0:
                store.commit(store.open(sequence, part))
    store.commit_steps([store.open_step(sequence) for sequence in sequences])
    assert {sequence.length for sequence in sequences} == {tokens}


@settings(max_examples=15)
@given(shapes(st.none()), st.integers(200, 5000), st.integers(1, 5))
def test_the_comparison_with_f16_is_honest(shape, tokens, sequences) -> None:
    plan = plan_for_tokens(shape, tokens, sequences)
    half = codecs.get("f16")
    plain = replace(
        shape, layers=tuple(replace(layer, codec_k=half, codec_v=half, mean_bits=0) for layer in shape.layers)
    )
    held = f16_tokens(plan)
    assert 0 < held <= tokens
    assert plan_for_tokens(plain, held, sequences).bytes <= plan.bytes
    assert held == tokens or plan_for_tokens(plain, held + 1, sequences).bytes > plan.bytes
    assert f16_tokens(plan_for_tokens(plain, tokens, sequences)) == tokens


@given(shapes(st.integers(1, 64)), st.integers(1, 5))
def test_any_length_fits_if_every_layer_has_a_window(shape, sequences) -> None:
    enough = plan_for_tokens(shape, 10_000, sequences).bytes * 4
    assert plan_for_memory(shape, enough, 10**7, sequences).tokens == 10**7


@pytest.mark.parametrize("tokens", [1, 64, 100, 128, 1000])
def test_a_short_conversation_takes_as_much_as_with_f16_and_a_longer_one_less(tokens: int) -> None:
    shape = CacheShape(64, (LayerShape(codecs.get("ring4"), codecs.get("ring3.5"), 3, 64, 8),) * 30)
    block, quantized = 64 * shape.f16_bytes_per_token, max(0, tokens // 64 - 1)
    assert shape.f16_bytes(tokens) == -(-tokens // 64) * block
    saved = quantized * (block - shape.quantized_bytes(range(30)))
    assert shape.f16_bytes(tokens) - shape.sequence_bytes(tokens) == saved
    assert (saved > 0) == (tokens >= 128)


@given(st.floats(1e-3, 1e4), st.sampled_from(["k", "K", "M", "G", "T"]), st.sampled_from(["", "B", "iB", "ib"]))
def test_sizes_are_read_in_binary_units(number: float, unit: str, end: str) -> None:
    expected = int(float(f"{number:.3f}") * 1024 ** ("kmgt".index(unit.lower()) + 1))
    assume(expected > 0)
    assert parse_size(f"{number:.3f}{unit}{end}") == expected
    assert parse_size(f" {number:.3f} {unit}{end} ") == expected


def test_malformed_sizes_are_refused() -> None:
    for text in ("", "M", "b", "0", "-1G", "nan", "inf", "infG", "1e400", "5X", "1,5G", "2GG", "0x10"):
        with pytest.raises(EngineError, match=r"kv_memory=.*is not a size"):
            parse_size(text)


@given(st.integers(1, 1 << 50))
def test_a_size_is_read_as_it_is_written(size: int) -> None:
    written = format_bytes(size)
    unit = 1024 ** ["B", "KiB", "MiB", "GiB"].index(written.split()[1])
    assert ("." in written) == (unit > 1)
    assert abs(parse_size(written) - size) <= 0.05 * unit + 1


def test_the_fit_line_has_the_numbers_of_the_plan(tiny_path: Path) -> None:
    """Of blocks that NumPy reads: kernels have tiles, which are padded."""
    with load_tiny(tiny_path, **PLAIN | {"block_size": 8}) as tiny:
        line, plan = tiny.fit_line(), tiny._parts.plan
        assert line == fit_line(tiny._parts)
        words = re.search(
            r"([\d.]+ \w+) on the cpu(?:, inputs of 16 bits)?; "
            r"KV store ([\d.]+ \w+) reserved, .*, (\d+) blocks of (\d+) as polarquant \(([\d.]+) bits/value\): "
            r"(\d+) tokens fit \(with an f16 cache: (\d+)\)",
            line,
        )
        weights, store, blocks, size, bits, tokens, plain = words.groups()
        assert weights == format_bytes(tiny._model.weights.bytes)
        assert store == format_bytes(plan.bytes)
        # In a whole context, all blocks but the first are quantized.
        assert (int(blocks) + 1) * int(size) == int(tokens) == tiny.context
        layers = len(plan.shape.layers)
        values = layers * 2 * 2 * 8 * 8  # K and V, heads, block, channels
        assert float(bits) == round(plan.shape.quantized_bytes(range(layers)) * 8 / values, 2)
        assert int(plain) == f16_tokens(plan) < int(tokens)
