"""Mistral 7B and its successors: Llama with a sliding window in every layer if the configuration sets one."""

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._decoder import decoder, plain_tensors, same_windows
from polarlm.model_loaders.fields import Fields

ARCHITECTURES = ("MistralForCausalLM",)  # GGUF files call them llama
tensors = plain_tensors


def configure(fields: Fields) -> ModelConfig:
    return decoder(fields, "mistral", windows=same_windows(fields))
