"""OLMo 2: norms after attention and feed-forward instead of before; one norm over all heads of q, and one of k."""

from __future__ import annotations

from functools import partial

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._decoder import PROJECTIONS, QK_NORMS, decoder
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import tensor_table

ARCHITECTURES = ("Olmo2ForCausalLM",)
# The key is OLMo 3's, whose files have the same architecture.
GGUF = GgufLayout("olmo2", keys={"sliding_window": "attention.sliding_window"})
_NAMES = {
    "attention_post_norm": (("post_attention_layernorm", "post_attention_norm"),),
    "ffn_post_norm": (("post_feedforward_layernorm", "post_ffw_norm"),),
    **QK_NORMS,
    **PROJECTIONS,
}
tensors = partial(tensor_table, names=_NAMES)


def configure(fields: Fields) -> ModelConfig:
    if fields.number("sliding_window", 0.0):
        raise fields.refuse("sliding_window", "which makes it an OLMo 3, which is not supported: use an OLMo 2")
    return decoder(fields, "olmo2", bias=None, qk_norm="all", norms="after")
