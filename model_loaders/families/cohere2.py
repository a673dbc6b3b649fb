"""Command R7B and Command A: Command R with windows and RoPE in three layers of four, none in the fourth."""

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families import cohere
from polarlm.model_loaders.families._decoder import layer_count, typed_windows
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.rope import rope_config

ARCHITECTURES = ("Cohere2ForCausalLM",)
GGUF = GgufLayout("cohere2", interleaved=True, keys={**cohere.GGUF_KEYS, "sliding_window": "attention.sliding_window"})
IS_INTERLEAVED = True
tensors = cohere.tensors


def configure(fields: Fields) -> ModelConfig:
    fields = cohere.with_defaults(fields).with_defaults({"sliding_window": 4096})
    interval = fields.integer("sliding_window_pattern", 4)
    windows = typed_windows(fields, ((layer + 1) % interval != 0 for layer in range(layer_count(fields))))
    rope = rope_config(fields, fields.integer("max_position_embeddings"))
    ropes = [None if window is None else rope for window in windows]
    return cohere.side_by_side(fields, "cohere2", windows=windows, ropes=ropes)
