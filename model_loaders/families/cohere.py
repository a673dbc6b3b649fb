"""Command R, Aya 23 and Aya Expanse: attention and network side by side, and RoPE on neighbouring channels."""

from dataclasses import replace
from functools import partial
from typing import Any

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._decoder import PRE_NORMS, PROJECTIONS, decoder
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import tensor_table

GGUF_KEYS = {"rms_norm_eps": "attention.layer_norm_epsilon", "logit_scale": "logit_scale"}
# The first files give the context that they were trained for under a key of its own.
_KEYS = {"rms_norm_eps": "layer_norm_eps", "max_position_embeddings": "model_max_length"}
ARCHITECTURES = ("CohereForCausalLM",)
GGUF = GgufLayout("command-r", interleaved=True, keys=GGUF_KEYS)
IS_INTERLEAVED = True
tensors = partial(tensor_table, names={"attention_norm": PRE_NORMS["attention_norm"], **PROJECTIONS})


def with_defaults(fields: Fields) -> Fields:
    return fields.with_file_keys(_KEYS).with_defaults({"tie_word_embeddings": True, "rms_norm_eps": 1e-5})


def side_by_side(fields: Fields, family: str, **settings: Any) -> ModelConfig:
    """The configuration of a model with one LayerNorm in a layer. settings: of `decoder`."""
    config = decoder(fields, family, bias=None, **settings)
    layers = tuple(replace(layer, parallel=True) for layer in config.layers)
    return replace(config, layers=layers, centred=True, logit_scale=fields.positive("logit_scale", 0.0625))


def configure(fields: Fields) -> ModelConfig:
    fields.require("use_qk_norm", False)  # Command R+ has it
    return side_by_side(with_defaults(fields), "cohere")
