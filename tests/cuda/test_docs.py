"""`docs/kernels.md` matches the code: its tables are recomputed from the code."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.engine import codecs, records
from polarlm.engine.backends.cuda.device import kernel_source
from polarlm.engine.backends.cuda.device.tracing import TracingDevice
from polarlm.engine.backends.cuda.kv.cache import SpanHeader
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.config import EngineConfig
from polarlm.engine.quantization.conditioning import mean_fields
from polarlm.engine.records import Layout
from polarlm.engine.sampling.sample import SamplerInput
from polarlm.engine.state import cache_types
from tests.cuda.test_model_emulated import GREEDY, N, model_of

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")

BLOCK = 64
MEAN_BITS = 8
RECORDS = ["ring4 keys", "ring3.5 values", "polarquant keys", "polarquant values"]
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
    """The layout of "ring4 keys" or "ring3.5 values"."""
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


def test_the_document_s_layouts_are_those_of_the_default_type() -> None:
    assert _both(*cache_types.PRESETS[EngineConfig().cache_type]) == tuple(RECORDS[:2])


# -- draws -----------------------------------------------------------------------------------------------------------


# -- launches ---------------------------------------------------------------------------------------------------------


class Listed(TracingDevice):
    """Names of launches. recorded: names of the last recording's launches."""

    def __init__(self) -> None:
        super().__init__(lambda launch: self.launches.append(launch.kernel.removesuffix("_kernel")), 6, 228 << 10)
        self.launches: list[str] = []

    def run_graph(self, key: Hashable, work: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        before = len(self.launches)
        result = super().run_graph(key, work, inputs)
        self.recorded = self.launches[before:]
        return result


def parts_of(rows: Sequence[Row], layers: int) -> list[str]:
    """Rows of a part and a kernel → all launches: a part's once, or as often as there are layers."""
    order: list[str] = []
    for part, group in itertools.groupby(rows, key=lambda row: row[0]):
        order += [kernel.strip("`") for _, kernel in group] * (layers if part == "layer" else 1)
    return order


def test_launches_match_the_document() -> None:
    """The launches of a prompt, without its head, and of a step that fills a block."""
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
