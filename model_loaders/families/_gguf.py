"""How llama.cpp's converter writes a family down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


def _nothing(values: Mapping[str, object]) -> Mapping[str, object]:
    return {}


@dataclass(frozen=True)
class GgufLayout:
    """architecture: what the files call it. interleaved: the pairs of channels that RoPE rotates stand side by side.

    keys: Hugging Face's names of further metadata, and theirs, after the architecture and a dot. implied: values that
    stand in no metadata, from those that were read.
    """

    architecture: str
    interleaved: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    implied: Callable[[Mapping[str, object]], Mapping[str, object]] = _nothing
