"""What stays out, and why: models that are no decoder of attention and one feed-forward layer each."""

from __future__ import annotations

from model_loaders.fields import Fields

_EXPERTS = "a mixture of experts, which is not supported: use a dense model"
_HYBRID = "which has layers of a recurrent state instead of a KV cache: use a model whose layers are all attention"
_IMAGES = "which sees images or hears sound, and is not supported: use a model for text alone"
_ENCODER = "which has an encoder, and is not supported: use a decoder"
_WORDS = {  # in a model type or an architecture of GGUF, without "_" and "-", the first that is found
    _IMAGES: ("vl", "vision", "llava", "mllama", "paligemma", "idefics", "gemma3n", "mistral3", "phi4mm", "smolvlm"),
    _EXPERTS: ("moe", "mixtral", "deepseek2", "deepseekv2", "deepseekv3", "gptoss", "dbrx", "llama4", "grok", "arctic"),
    _HYBRID: ("mamba", "jamba", "rwkv", "falconh1", "bamba", "zamba", "nemotronh", "hybrid", "lfm2", "recurrent"),
    _ENCODER: ("t5", "bart", "whisper", "pegasus", "marian", "bert", "encoder", "electra", "deberta"),
}
_KEYS = {  # of a configuration
    _EXPERTS: ("num_local_experts", "num_experts", "n_routed_experts", "expert_count"),
    _IMAGES: ("vision_config", "audio_config"),
    _HYBRID: ("mamba_d_state", "ssm_cfg", "state_size"),
}


def why_not(name: str, fields: Fields | None = None) -> str | None:
    """What a model of this type is and what to use instead, to follow its name in a sentence; None for all others."""
    plain = name.lower().replace("_", "").replace("-", "")
    for reason, words in _WORDS.items():
        if any(word in plain for word in words):
            return reason
    if fields is not None:
        for reason, keys in _KEYS.items():
            if any(fields.has(key) for key in keys):
                return reason
        if fields.has("is_encoder_decoder") and fields.flag("is_encoder_decoder", False):
            return _ENCODER
    return None
