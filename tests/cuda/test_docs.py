"""`docs/kernels.md` matches the code: its tables are recomputed from the code."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.bench.gpu.shapes import LLAMA_8B, parameters
from polarlm.engine import codecs, records
from polarlm.engine.backends.cuda.device import kernel_source
from polarlm.engine.backends.cuda.device.tracing import TracingDevice
from polarlm.engine.backends.cuda.kv.cache import SpanHeader
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.cuda.sampling import inputs as sampler_inputs
from polarlm.engine.config import EngineConfig
from polarlm.engine.quantization.conditioning import mean_fields
from polarlm.engine.records import Layout
from polarlm.engine.records.pair_table import PairRecord
from polarlm.engine.sampling.sample import Penalties, SamplerInput
from polarlm.engine.state import cache_types
from tests.cuda.test_model_emulated import GREEDY, N, model_of

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")

BLOCK = 64
MEAN_BITS = 8
RECORDS = ["ring4 keys", "ring3.5 values", "polarquant keys", "polarquant values"]
RECORDS += ["f16 keys", "f16 values", "turbo3 keys", "turbo3 values"]
# Sections in their order → fields of `Codec.encode` and of the mean.
SECTIONS = {
    "codes": {"codes"},
    "angles": {"level1"},
    "rows": {"upper8", "upper6"},
    "radii": {"radius"},
    "halves": {"values"},
    "norms": {"norm"},
    "mean": {"mean"},
    "scale": {"mean_scale"},
}

Row = tuple[str, ...]
Fields = dict[str, np.ndarray]


def table(*header: str) -> list[Row]:
    """The rows of the only table with this header."""
    line = f"\n| {' | '.join(header)} |\n"
    assert TEXT.count(line) == 1, f"one table has the header {header}"
    rows = itertools.takewhile(lambda row: row.startswith("|"), TEXT.split(line)[1].splitlines()[1:])
    return [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in rows]


def layout_of(record: str, head_dim: int) -> Layout:
    """Of "ring4 keys" or "ring3.5 values"."""
    name, side = record.split()
    mean_bits = MEAN_BITS if side == "keys" and name != "f16" else 0
    return records.layout(codecs.get(name), side == "values", BLOCK, head_dim, mean_bits)


def zeros_of(record: str, head_dim: int) -> tuple[Fields, Fields]:
    """Fields of a block, and of its mean, all of them zero."""
    fields = codecs.get(record.split()[0]).fields(BLOCK, head_dim)
    bits = layout_of(record, head_dim).mean_bits
    means = mean_fields(bits, head_dim) if bits else {}
    return _zeros(fields), _zeros(means)


def _zeros(of: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> Fields:
    return {name: np.zeros(shape, dtype) for name, (shape, dtype) in of.items()}


def ones_in(fields: Fields, names: set[str]) -> Fields:
    """`fields` with every bit set in those called `names`."""
    ones = {name: np.frombuffer(b"\xff" * x.nbytes, x.dtype).reshape(x.shape) for name, x in fields.items()}
    return {name: (ones if name in names else fields)[name] for name in fields}


def extents(record: str, head_dim: int) -> dict[str, tuple[int, int]]:
    """Section → its offset and bytes: what changes in a record with the section's fields; "zeros": what never does."""
    layout, (fields, means) = layout_of(record, head_dim), zeros_of(record, head_dim)
    empty, found, end = layout.pack(fields, means), {}, 0
    for section, names in SECTIONS.items():
        if not names & {*fields, *means}:
            continue
        changed = np.flatnonzero(layout.pack(ones_in(fields, names), ones_in(means, names)) != empty)
        assert len(changed) == changed[-1] - changed[0] + 1, "a section is in one piece"
        assert changed[0] >= end, "sections are in order"
        found[section], end = (int(changed[0]), len(changed)), int(changed[-1]) + 1
    assert {name for section in found for name in SECTIONS[section]} >= {*fields, *means}
    return {**found, "zeros": (end, layout.nbytes - end)} if end < layout.nbytes else found


def section_rows() -> Iterator[Row]:
    for record in RECORDS:
        wide, narrow = extents(record, 128), extents(record, 64)
        assert wide.keys() == narrow.keys()
        for section in wide:
            yield record, section, *(f"{number:,}" for number in (*wide[section], *narrow[section]))


def test_offsets_of_sections_match_the_document() -> None:
    assert table("Record", "Section", "D = 128: at", "bytes", "D = 64: at", "bytes") == list(section_rows())


def size_rows() -> Iterator[Row]:
    for record, head_dim in itertools.product(RECORDS, (128, 64)):
        fields, means = zeros_of(record, head_dim)
        stored = sum(x.nbytes for x in (*fields.values(), *means.values()))
        sizes = stored, layout_of(record, head_dim).nbytes
        yield record, str(head_dim), *itertools.chain(*((f"{n:,}", f"{8 * n / BLOCK / head_dim:.4f}") for n in sizes))


def test_sizes_match_the_layouts() -> None:
    assert table("Record", "D", "Fields, bytes", "bits/value", "Record, bytes", "bits/value") == list(size_rows())


# -- the example ---------------------------------------------------------------------------------------------------

# What the document writes of a number in a block → the array that it is in, and the type of its bits.
_NUMBERS = {
    "norm of token": ("norm", np.uint8),
    "mean of channel": ("mean", np.uint8),
    "value of token": ("values", np.uint16),
}


def record_with(record: str, what: str, bits: int) -> np.ndarray:
    """A record at D = 128 in which everything is zero but one number, given as its bits."""
    layout, (fields, means) = layout_of(record, 128), zeros_of(record, 128)
    place = tuple(int(number) for number in re.findall(r"\d+", what))
    if what.startswith("code of token"):
        assert isinstance(layout.record, PairRecord)
        codes = np.zeros((BLOCK, 64), np.uint8)
        codes[place] = bits
        fields["codes"] = layout.schema["codes"].pack(codes)
    else:
        name, kind = _NUMBERS[" ".join(what.split()[:3])]
        {**fields, **means}[name].view(kind)[place] = bits
    return layout.pack(fields, means)


def where(record: str, what: str) -> dict[int, int]:
    """Byte of a record, in the order of the bits of `what` → which of the byte's bits they are."""
    width = layout_of(record, 128).record.constants.get("BITS", 0) if what.startswith("code") else 8
    found: dict[int, int] = {}
    for bit in range(16 if what.startswith("value") else width):
        packed = record_with(record, what, 1 << bit)
        (at,) = np.flatnonzero(packed)
        found[int(at)] = found.get(int(at), 0) | int(packed[at])
    return found


@pytest.mark.parametrize(("record", "what", "places", "bits"), table("Record", "What", "Bytes", "Bits of each"))
def test_the_example_matches_the_record(record: str, what: str, places: str, bits: str) -> None:
    assert list(where(record, what).items()) == [(int(place), int(bits, 16)) for place in places.split(",")]


# -- shared memory, and the floor of a step --------------------------------------------------------------------------


def shared_rows() -> Iterator[Row]:
    for name in ("ring4/ring3.5", "ring5/ring4", "turbo3/turbo3", "polarquant/polarquant", "f16/f16"):
        keys, values = (layout_of(record, 128) for record in _both(*name.split("/")))
        rows = str(keys.record.rows), str(values.record.rows)
        yield name, *rows, f"{records.table_bytes(keys, values):,}"


def _both(keys: str, values: str) -> tuple[str, str]:
    return f"{keys} keys", f"{values} values"


def test_bytes_of_tables_match_the_document() -> None:
    assert table("Keys/values", "Rows, keys", "Rows, values", "Bytes of a CTA") == list(shared_rows())


def weight_bytes() -> int:
    """Bytes of all matrices that a step reads; the rows of the embedding are negligible."""
    of_layers, embedding_and_head = parameters(LLAMA_8B)
    return 2 * (of_layers + embedding_and_head // 2)


def kv_bytes(keys: str, values: str, context: int) -> int:
    """Bytes that one token's attention reads; all blocks but the first and the last are quantized."""
    sides = _both(keys, values)
    quantized, exact = (sum(layout_of(record, 128).nbytes for record in of) for of in (sides, _both("f16", "f16")))
    blocks = -(-context // BLOCK)
    return len(LLAMA_8B.layers) * LLAMA_8B.attention.kv_heads * ((blocks - 2) * quantized + 2 * exact)


def roofline_rows(bandwidth: float) -> Iterator[Row]:
    """bandwidth: TB/s."""
    types = {"f16": ("f16", "f16"), "default": cache_types.PRESETS[EngineConfig().cache_type]}
    types |= {"compact": cache_types.PRESETS["compact"], "polarquant": ("polarquant", "polarquant")}
    for context, (name, sides) in itertools.product((2048, 32768, 131072), types.items()):
        size = kv_bytes(*sides, context)
        floors = (f"{total / bandwidth / 1e9:.3f}" for total in (size, size + weight_bytes()))
        yield f"{context:,}", name, f"{size:,}", f"{kv_bytes('f16', 'f16', context) / size:.2f}", *floors


def test_the_least_time_of_a_step_follows_from_the_sizes_of_records() -> None:
    (bandwidth,) = re.findall(r"bandwidth of (\d+\.\d+) TB/s", TEXT)
    written = table("Context", "Cache", "KV bytes of a step", "f16 / this", "KV, ms", "KV and weights, ms")
    assert written == list(roofline_rows(float(bandwidth)))
    assert f"{weight_bytes():,} bytes" in TEXT


def test_the_document_s_layouts_are_those_of_the_default_type() -> None:
    assert _both(*cache_types.PRESETS[EngineConfig().cache_type]) == tuple(RECORDS[:2])


# -- draws -----------------------------------------------------------------------------------------------------------


def draws_rows() -> Iterator[Row]:
    vocabulary = LLAMA_8B.vocab_size
    plain = SamplerInput(GREEDY, list(range(64)), 0.5, vocabulary)
    asked: dict[str, dict[str, Any]] = {
        "no more than a sampler": {},
        "4 biases, as bans of end tokens": {"logit_bias": dict.fromkeys(range(4), -math.inf)},
        "penalties, on 64 tokens": {"presence_penalty": 1.0},
        "300 biases": {"logit_bias": dict.fromkeys(range(300), 1.0)},
        "DRY, against 100 tokens": {"dry": Penalties(np.arange(100), np.ones(100))},
        "a mask": {"allowed": np.zeros(-(-vocabulary // 32), np.uint32)},
    }
    asked["all of these"] = {name: value for more in asked.values() for name, value in more.items()}
    for name, more in asked.items():
        of_draw = {field: more[field] for field in ("dry", "allowed") if field in more}
        chain = replace(GREEDY, **{field: value for field, value in more.items() if field not in of_draw})
        sampler_input = replace(plain, sampling=chain, **of_draw)
        lists = sum(part.nbytes for part in sampler_inputs._lists(sampler_input)[0])
        yield name, f"{lists:,}", f"{sampler_inputs.pack_sampler_inputs([sampler_input]).table.nbytes:,}"


def test_bytes_of_draws_match_the_document() -> None:
    assert table("The row asks for", "In its lists", "Table") == list(draws_rows())


# -- launches ---------------------------------------------------------------------------------------------------------


class Listed(TracingDevice):
    """Names of launches. recorded: those of the last recording."""

    def __init__(self) -> None:
        super().__init__(lambda launch: self.launches.append(launch.kernel.removesuffix("_kernel")), 6, 228 << 10)
        self.launches: list[str] = []

    def run_graph(self, key: Hashable, work: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        before = len(self.launches)
        result = super().run_graph(key, work, inputs)
        self.recorded = self.launches[before:]
        return result


def parts_of(rows: Sequence[Row], layers: int) -> list[str]:
    """Rows of a part and a kernel → all launches: those of a part once, or as often as there are layers."""
    order: list[str] = []
    for part, group in itertools.groupby(rows, key=lambda row: row[0]):
        order += [kernel.strip("`") for _, kernel in group] * (layers if part == "layer" else 1)
    return order


def test_launches_match_the_document() -> None:
    """Of a prompt, without its head, and of a step that fills a block."""
    device = Listed()
    model, ids = model_of(CudaOps(device), "llama_gqa_linear", ("ring4", "ring3.5")), [1] * (6 * N - 1)
    layers, sequence = len(model.config.layers), model.store.new_sequence()

    device.launches.clear()
    span = model.store.open(sequence, len(ids))
    model.forward([span], ids)
    model.store.commit(span)
    assert device.launches == parts_of([row[:2] for row in table("Part", "Kernel", "What it does")], layers)

    device.launches.clear()
    span = model.store.open_step(sequence)
    model.step([span], [1], [SamplerInput(GREEDY, [], 0.5, model.config.vocab_size)])
    model.store.commit(span)
    rows = table("Recorded", "Part", "Kernel", "What it does")
    assert device.launches == parts_of([row[1:3] for row in rows], layers)
    assert device.recorded == parts_of([row[1:3] for row in rows if row[0] == "yes"], layers)


def test_the_words_of_a_span_match_its_struct() -> None:
    rows = table("Words of a span (`Span` in `prelude.cuh`)", "Meaning")
    assert re.findall(r"`(\w+)`", " ".join(words for words, _ in rows)) == list(SpanHeader._fields)


def test_files_that_the_document_names_exist() -> None:
    root = kernel_source.folder().parent
    for name in re.findall(r"`((?:cuda|engine|tests|bench|scripts)/[\w./]+\.\w+)`", TEXT):
        assert (root / name).is_file(), name
