"""ERNIE 4.5, dense: Llama whose RoPE rotates neighbouring channels, in safetensors, too."""

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._decoder import decoder, plain_tensors
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields

ARCHITECTURES = ("Ernie4_5ForCausalLM",)
GGUF = GgufLayout("ernie4_5", interleaved=True)
IS_INTERLEAVED = True
tensors = plain_tensors


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults({"rope_theta": 500_000.0, "tie_word_embeddings": True, "rms_norm_eps": 1e-5})
    bias = fields.flag("use_bias", False)
    return decoder(fields, "ernie4_5", bias=bias, mlp_bias=bias, head_dim=128)
