"""How llama.cpp's converter writes a family to GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from polarlm.model_loaders.config import ModelConfig

LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"  # of yarn's attention factor


def without_last(values: Mapping[str, object]) -> dict[str, object]:
    """The number of layers without those that predict several tokens, which GGUF files count, too."""
    layers, after_last = values["num_hidden_layers"], values["layers_after_last"]
    if isinstance(layers, int) and isinstance(after_last, int):
        return {"num_hidden_layers": layers - after_last}
    return {}


@dataclass(frozen=True)
class GgufLayout:
    """architecture: its name in GGUF files. other_architectures: names of others that are written in the same way.

    interleaved: RoPE's pairs are neighbouring channels, unless it has sections.

    keys: Hugging Face's keys of further metadata → GGUF's, without the architecture and the dot. implied_values:
    returns values that the metadata lacks, given those that it has.
    """

    architecture: str
    interleaved: bool = False
    other_architectures: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    implied_values: Callable[[Mapping[str, object]], Mapping[str, object]] = lambda values: {}

    def is_interleaved(self, config: ModelConfig) -> bool:
        return self.interleaved and not config.has_sections
