"""Parsing of cache types: for keys and values, for all layers or for some."""

from __future__ import annotations

import pytest

from polarlm.engine import codecs
from polarlm.engine.config import EngineConfig
from polarlm.engine.errors import EngineError
from polarlm.engine.state.cache_types import PRESETS, layer_codecs, types_by_side

LAYERS, HEAD_DIM = 6, 64


def names(**settings: str) -> list[tuple[str, str]]:
    return [(k.name, v.name) for k, v in layer_codecs(EngineConfig(**settings), [HEAD_DIM] * LAYERS)]


def refusal(**settings: str) -> str:
    with pytest.raises(EngineError) as raised:
        layer_codecs(EngineConfig(**settings), [HEAD_DIM] * LAYERS)
    return str(raised.value)


def test_one_type_serves_keys_and_values() -> None:
    for name in codecs.available():
        if codecs.get(name).serves == codecs.KEYS_AND_VALUES:
            assert names(cache_type=name) == [(name, name)] * LAYERS
        else:
            assert names(cache_type_k=name, cache_type_v="f16") == [(name, "f16")] * LAYERS


def test_presets_name_types_that_exist() -> None:
    for preset in PRESETS:
        assert names(cache_type=preset) == [PRESETS[preset][:2]] * LAYERS


def test_cache_type_k_and_cache_type_v_override_cache_type() -> None:
    assert names(cache_type="f16", cache_type_k="polarquant") == [("polarquant", "f16")] * LAYERS
    assert names(cache_type="f16", cache_type_v="polarquant") == [("f16", "polarquant")] * LAYERS
    assert names(cache_type="balanced", cache_type_k="f16") == [("f16", "ring3")] * LAYERS
    assert types_by_side(EngineConfig(cache_type="f16", cache_type_v="turbo3")) == (
        ("cache_type", "f16"),
        ("cache_type_v", "turbo3"),
    )


def test_a_pair_names_the_types_of_keys_and_of_values() -> None:
    assert names(cache_type="ring5/ring4") == [("ring5", "ring4")] * LAYERS
    assert names(cache_type="polarpair-m4n4/f16") == [("polarpair-m4n4", "f16")] * LAYERS
    assert names(cache_type="ring4@0-1,ring3.5/f16")[1:3] == [("ring4", "f16"), ("ring3.5", "f16")]
    assert names(cache_type="ring5/ring4", cache_type_v="f16") == [("ring5", "f16")] * LAYERS


def test_half_a_pair_is_refused() -> None:
    for types in ("ring5/", "/ring4", "ring5/ring4/ring3", "/"):
        assert "KEYS/VALUES as in ring5/ring4" in refusal(cache_type=types)


def test_an_unknown_type_is_refused_with_the_available_ones() -> None:
    sentence = refusal(cache_type="rign4")
    assert sentence.startswith("cache_type=rign4: there is no such type")
    assert all(word in sentence for word in (*PRESETS, *codecs.available(), "KEYS/VALUES", "cache_type_k"))
    assert "KEYS/VALUES is for cache_type" in refusal(cache_type_k="ring5/ring4")


def test_bits_by_room_are_refused_with_the_presets() -> None:
    sentence = refusal(cache_type="auto")
    assert sentence.startswith("cache_type=auto: bits by room are no more: choose ")
    assert all(preset in sentence for preset in PRESETS)


@pytest.mark.parametrize(
    ("former", "choice"),
    [
        *(("trellis3.5", "ring3.5"), ("trellis4+norm16", "ring4"), ("kivi4+token", "ring4")),
        *(("q8_0", "linear8"), ("q4_0", "ring4")),
    ],
)
def test_types_that_have_left_name_what_to_take(former: str, choice: str) -> None:
    for settings in ({"cache_type": former}, {"cache_type": f"f16/{former}"}, {"cache_type_k": f"{former}@0,f16"}):
        assert f"={former}: it is " in refusal(**settings)
        assert f"choose {choice}, " in refusal(**settings)


def test_a_preset_cannot_be_part_of_a_type() -> None:
    for settings in ({"cache_type_k": "balanced"}, {"cache_type": "f16/balanced"}, {"cache_type": "balanced@0,f16"}):
        assert "a preset stands alone, as cache_type=balanced; choose one of f16" in refusal(**settings)


def test_layers_may_differ() -> None:
    keys = [k for k, _ in names(cache_type_k="ring4@0-1,ring3.5,f16@5")]
    assert keys == ["ring4", "ring4", "ring3.5", "ring3.5", "ring3.5", "f16"]
    assert [v for _, v in names(cache_type_v="ring3@0-5")] == ["ring3"] * LAYERS


MALFORMED = [
    ("ring9", ["ring9", "ring3"]),
    ("ring4@0-9,f16", ["layers 0-9", "0 to 5"]),
    ("ring4@3-1,f16", ["layers 3-1"]),
    ("ring4@0-1", ["layer 2 has no type"]),
    ("ring4,ring3", ["ring4 and ring3"]),
    ("ring4@x,ring3", ["ring4@0-1"]),
    ("", ["ring4@0-1"]),
]


def test_malformed_types_are_refused_with_the_setting() -> None:
    for types, words in MALFORMED:
        sentence = refusal(cache_type_k=types)
        assert sentence.startswith("cache_type_k=")
        assert all(word in sentence for word in words), sentence


def test_keys_only_and_unserved_head_dims_are_refused() -> None:
    assert "keys only; give the others a type of their own, as in polarpair-m4n4/f16" in refusal(
        cache_type="polarpair-m4n4"
    )
    assert "keys only; choose another type here" in refusal(cache_type_v="polarpair-m4n4")
    with pytest.raises(EngineError, match="cache_type_v=polarquant"):
        layer_codecs(EngineConfig(cache_type_k="f16", cache_type_v="polarquant"), [20])
