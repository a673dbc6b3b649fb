"""SmolLM3: Llama without RoPE in every fourth layer."""

from __future__ import annotations

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._decoder import decoder, layer_count, plain_tensors, typed_windows
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.rope import rope_config

ARCHITECTURES = ("SmolLM3ForCausalLM",)
GGUF = GgufLayout("smollm3", interleaved=True)
tensors = plain_tensors
_DEFAULTS = {"rope_theta": 2_000_000.0, "tie_word_embeddings": True}  # where they differ from Llama's


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(_DEFAULTS)
    count, interval = layer_count(fields), fields.integer("no_rope_layer_interval", 4)
    has_rope = fields.integers("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(count)]
    if len(has_rope) < count:
        raise fields.refuse("no_rope_layers", f"but must say for each of {count} layers whether it has RoPE")
    windows: tuple[int | None, ...] = ()
    if fields.flag("use_sliding_window", False) and fields.has("sliding_window"):
        windows = typed_windows(fields, (not rope for rope in has_rope[:count]))
    rope = rope_config(fields, fields.integer("max_position_embeddings"))
    return decoder(
        fields,
        "smollm3",
        rope=rope,
        bias=None,
        mlp_bias=fields.flag("mlp_bias", False),
        windows=windows,
        ropes=[rope if has_rope[layer] else None for layer in range(count)],
    )
