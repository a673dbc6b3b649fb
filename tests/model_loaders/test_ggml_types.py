"""The table of tensor types agrees with the package gguf."""

from __future__ import annotations

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from polarlm.model_loaders.files.ggml_types import BY_NAME, TYPES
from polarlm.model_loaders.files.tensors import READABLE


def test_types_are_those_of_gguf() -> None:
    """Newer versions may have more."""
    known = {type.value: (type.name, *GGML_QUANT_SIZES[type]) for type in GGMLQuantizationType}
    assert {number: known[number] for number in TYPES if number in known} == {
        number: tuple(type) for number, type in TYPES.items() if number in known
    }
    assert set(known) & set(range(40)) <= set(TYPES)


def test_all_types_that_can_be_read_have_a_size() -> None:
    assert set(READABLE) <= set(BY_NAME)
