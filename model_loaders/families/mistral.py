"""Mistral 7B and its successors: Llama with a sliding window in every layer if the configuration sets one."""

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._decoder import decoder, layer_count, plain_tensors
from polarlm.model_loaders.fields import Fields

ARCHITECTURES = ("MistralForCausalLM",)  # GGUF files call them llama
tensors = plain_tensors


def configure(fields: Fields) -> ModelConfig:
    windows: tuple[int | None, ...] = ()
    if fields.has("sliding_window"):
        windows = (fields.integer("sliding_window"),) * layer_count(fields)
    return decoder(fields, "mistral", windows=windows)
