"""ModernBERT: an encoder with RoPE, windows in two layers of three, LayerNorms without biases, and gated networks."""

from dataclasses import replace
from typing import Any

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._decoder import decoder, layer_count, typed_ropes, typed_windows
from polarlm.model_loaders.families._encoder import prefixes, scores_pairs
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import Names, TensorTable, tensor_table

ARCHITECTURES = ("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification")
_KEYS = {
    "rms_norm_eps": "norm_eps",
    "hidden_act": "hidden_activation",
    "sliding_window": "local_attention",
    "rope_theta": "global_rope_theta",
    "rope_local_base_freq": "local_rope_theta",
}
_GGUF_KEYS = {
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps"), "attention.layer_norm_epsilon"),
    "hidden_act": "hidden_activation",
    "sliding_window": "attention.sliding_window",
    "global_attn_every_n_layers": "attention.sliding_window_pattern",
    "rope_local_base_freq": "rope.freq_base_swa",
}
GGUF = GgufLayout("modern-bert", keys=_GGUF_KEYS, implied_values=lambda values: {"classifier_pooling": "mean"})
_HEAD = {"head.dense.": "model.score_dense.", "head.norm.": "model.score_norm.", "classifier.": "model.score."}
PREFIXES = prefixes("model.", layers="layers", norm="embeddings.norm") | _HEAD
_NAMES: Names = {
    "attention_norm": (("attn_norm", "attn_norm"),),
    "qkv": (("attn.Wqkv", "attn_qkv"),),
    "out": (("attn.Wo", "attn_output"),),
    "ffn_norm": (("mlp_norm", "ffn_norm"),),
    "gate_up": (("mlp.Wi", "ffn_up"),),
    "down": (("mlp.Wo", "ffn_down"),),
}
_ALLOWED = {"norm_bias": False, "classifier_bias": False, "classifier_activation": "gelu"}


def tensors(config: ModelConfig) -> TensorTable:
    table = tensor_table(config, _NAMES)
    first = {slot: specs for slot, specs in table.layers[0].items() if slot != "attention_norm"}
    return replace(table, layers=(first, *table.layers[1:]))


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_file_keys(_KEYS).with_defaults({"sliding_window": 128, "rms_norm_eps": 1e-5})
    for key, value in _ALLOWED.items():
        fields.require(key, value)
    if (kind := fields.text("classifier_pooling", "cls")) not in ("cls", "mean"):
        raise fields.refuse("classifier_pooling", "but only cls and mean are supported")
    interval, mlp_bias = fields.integer("global_attn_every_n_layers", 3), fields.flag("mlp_bias", False)
    windows = typed_windows(fields, (layer % interval > 0 for layer in range(layer_count(fields))))
    rope, local = typed_ropes(fields, 160_000.0, 10_000.0)
    ropes = [rope if window is None else local for window in windows]
    settings: dict[str, Any] = {"activations": {"gelu": "gated_gelu", "silu": "silu"}, "bias": None, "rope": rope}
    config = decoder(fields, "modernbert", mlp_bias=mlp_bias, windows=windows, ropes=ropes, is_causal=False, **settings)
    return replace(config, centred=True, tied_head=True, scores_pairs=scores_pairs(fields), pooled_pairs=kind == "mean")
