"""The cache types that are compared."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
from polarlm.bench.quality.needle import Prompt, find
from polarlm.bench.quality.reference import Reference

from polarlm.bench.quality.scores import measure
from polarlm.bench.quality.types import all_types, chosen_types
from polarlm.engine import codecs
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.loading.encoding import Encoding
from polarlm.engine.state.cache_types import PRESETS


def test_all_types_cover_every_codec() -> None:
    types = all_types(64, key_conditioning=True)
    assert {one.key for one in types} == set(codecs.available())
    assert set(PRESETS.values()) <= {(one.key, one.value) for one in types if one.key_conditioning}
    assert all("v" in codecs.get(one.value).serves for one in types)
    labels = [one.label for one in types]
    assert len(set(labels)) == len(labels)
    assert "polarquant:plain" in labels
    assert not any(label.endswith(":plain") for label in labels if label.startswith(("f16", "ring", "trellis")))
    plain = all_types(64, key_conditioning=False)
    assert not any(one.key_conditioning for one in plain)


def test_types_that_do_not_support_the_head_dim_are_left_out() -> None:
    found = {one.key for one in all_types(8, key_conditioning=True)}
    assert "polarquant" in found
    assert "q8_0" not in found


def test_types_and_an_ablation_can_be_combined() -> None:
    f16, whole, *others, bare = chosen_types("f16", "ring4/f16", key_conditioning=True)
    assert f16.label == "f16"
    assert (whole.label, whole.encoding) == ("ring4/f16 encoded well", Encoding())
    parts = [part.name for part in fields(Encoding)]
    assert [one.label for one in others] == [f"ring4/f16 without {part.replace('_', ' ')}" for part in parts]
    assert [one.encoding for one in others] == [replace(Encoding(), **{part: False}) for part in parts]
    assert bare.encoding == Encoding(**dict.fromkeys(parts, False))
    assert all((one.key, one.value, one.key_conditioning) == ("ring4", "f16", True) for one in (whole, *others, bare))


def test_an_ablation_needs_a_type_with_conditioning() -> None:
    with pytest.raises(FlagError, match=r"--ablate polarquant:plain: .*without :plain"):
        chosen_types(None, "polarquant:plain", key_conditioning=True)


def test_no_types_are_chosen_by_default() -> None:
    assert chosen_types(None, None, key_conditioning=True) == []


def test_an_ablation_is_measured_with_its_own_encoding(tiny_path: Path) -> None:
    """Means of 16 bits a channel instead of 8, in blocks of 64 tokens, add 8 / 64 bits to each value of keys."""
    whole, *others = chosen_types(None, "ring4", key_conditioning=True)
    (large_means,) = [one for one in others if one.label == "ring4 without small means"]
    ids = [*range(5, 85)] * 2  # a quantized block between the first and the current one
    with Reference(str(tiny_path), len(ids)) as reference:
        rows = measure(reference, [whole, large_means], [ids]).rows
        cells = find(reference, [whole, large_means], [Prompt(len(ids), 50, ids[:-2], ids[-2:])])
    bits = {row.type: row.bits_per_value for row in rows}
    assert bits[large_means.label] > bits[whole.label]
    assert len({cell.logprob for cell in cells if cell.scored_as == rows[0].scored_as}) == 2
