"""Reads configuration and weights from a GGUF file, under Hugging Face's names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from polarlm.model_loaders.config import Attention, ModelConfig
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.families import GgufLayout, configure, gguf_layouts, tensors
from polarlm.model_loaders.families._unsupported import why_not
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.file_bytes import FileBytes
from polarlm.model_loaders.files.gguf_file import GgufFile, GgufTensor, beginning_of_metadata
from polarlm.model_loaders.files.pooling import dense_of_gguf
from polarlm.model_loaders.files.tensors import StoredTensor, StoredWeights
from polarlm.model_loaders.files.weights import fit

_KEYS = {  # Hugging Face's key → the file's, without the architecture and the dot
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
_ORIGINAL_CONTEXT = "original_context_length"
_ROPE_KEYS = {
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": f"rope.scaling.{_ORIGINAL_CONTEXT}",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
_MISTRAL = {
    "sliding_window": "attention.sliding_window",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(\w+)(\[\d+\])?")
_SCALED = "NVFP4"  # a tensor `x.weight` of this type is multiplied by the number in `x.scale`, if that exists
_ROPE_DIVISORS = "rope_freqs.weight"
_LONGROPE = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}


def open_gguf(gguf: GgufFile) -> tuple[ModelConfig, StoredWeights]:
    """(configuration, weights). Raises LoadError for an unsupported architecture or feature, and for wrong tensors."""
    arch, family, layout = _family(gguf.metadata, gguf.path)
    config = replace(configure(_fields(gguf, f"{arch}.", family, layout)), dense=dense_of_gguf(gguf))
    whole = next((one for one in config.attentions.values() if one.window is None), config.attention)
    _check_head_channels(gguf, f"{arch}.", whole)
    if _ROPE_DIVISORS in gguf.tensors:
        divisors = _checked_divisors(gguf, whole)

        def divided(one: Attention) -> Attention:
            has_others = one.rope is None or (one.rope, one.rotated) != (whole.rope, whole.rotated)
            return one if has_others else replace(one, rope=one.rope and replace(one.rope, divisors=divisors))

        config = config.with_attention(divided)
    weights = StoredWeights(gguf.path, _tensors(gguf, config), gguf.files)
    return fit(config, weights, interleaved=layout.interleaved, is_gguf=True)


def sizes_from_beginning(content: bytes, where: str) -> ModelConfig | None:
    """The configuration in the first bytes of a file, whose sizes alone are valid; None if the bytes lack them.

    where: the file's name, for errors. Raises LoadError for an unsupported architecture or feature.
    """
    metadata = beginning_of_metadata(content, where)
    if "general.architecture" not in metadata:
        return None
    arch, family, layout = _family(metadata, where)
    rows, columns = (metadata.get(f"{arch}.{key}") for key in ("vocab_size", _KEYS["hidden_size"]))
    shape = tuple(number if isinstance(number, int) else 1 for number in (rows, columns))
    embedding = GgufTensor("token_embd.weight", shape, "F32", 0, 0)
    try:
        return configure(_fields(_Head(where, metadata, {embedding.name: embedding}), f"{arch}.", family, layout))
    except LoadError:
        return None  # the whole file may have what its beginning lacks


@dataclass(frozen=True)
class _Head:
    """The header of a GGUF file."""

    path: str | Path
    metadata: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]


def _family(metadata: Mapping[str, object], where: str | Path) -> tuple[str, str, GgufLayout]:
    """(architecture, family, layout). Raises LoadError for an unsupported architecture or feature."""
    arch, layouts = metadata.get("general.architecture"), gguf_layouts()
    if not isinstance(arch, str) or arch not in layouts:
        reason = why_not(arch) if isinstance(arch, str) else None
        raise LoadError(
            f"{where} holds a model of architecture {arch!r}, {reason or 'which is not supported'}; "
            f"supported are {', '.join(sorted(layouts))} (Mistral's files call themselves llama)."
        )
    family, layout = layouts[arch]
    _refuse_unsupported(metadata, where, f"{arch}.", layout.keys)
    return arch, family, layout


def _refuse_unsupported(
    metadata: Mapping[str, object], where: str | Path, prefix: str, keys: Mapping[str, str]
) -> None:
    def given(key: str) -> object:
        """The value of a key; None if it is 0, false or empty, which switches the feature off."""
        return metadata.get(key) or None

    if given(prefix + "expert_count") and "expert_count" not in keys.values() and prefix != "llama.":
        raise LoadError(f"{where} holds a mixture of experts, which {prefix[:-1]} models have not; use another file.")
    if metadata.get(prefix + "attention.causal") is False and "layer_norm_eps" not in keys:
        raise LoadError(
            f"{where} holds an embedding model, whose tokens attend to later ones ({prefix}attention.causal is "
            "false): it cannot generate text; use a generative model."
        )
    if given(prefix + "rope.scaling.yarn_log_multiplier"):
        raise LoadError(f"{where} asks for yarn_log_multiplier, a kind of RoPE that is not supported.")


def _fields(gguf: GgufFile | _Head, prefix: str, family: str, layout: GgufLayout) -> Fields:
    """The metadata under Hugging Face's keys, with the file's own keys for error messages."""
    metadata, keys = gguf.metadata, {**_KEYS, **layout.keys}
    names = {ours: prefix + theirs for ours, theirs in {**keys, **_ROPE_KEYS}.items()}
    values = {ours: metadata.get(names[ours]) for ours in keys}
    names["rope_parameters"] = prefix + "rope.scaling"
    names["model_type"] = "general.architecture"
    values["model_type"], values["gguf_architecture"] = family, prefix[:-1]
    values["rope_parameters"] = _rope_parameters(metadata, prefix)
    if isinstance(gguf, GgufFile) and gguf.tensors.keys() >= set(_LONGROPE.values()):
        names |= _LONGROPE
        values["rope_parameters"] = _longrope(gguf, prefix)
    values["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
    values["mlp_bias"] = "blk.0.ffn_up.bias" in gguf.tensors
    values["use_qk_norm"] = "blk.0.attn_q_norm.weight" in gguf.tensors
    keys_alone = (name for name in gguf.tensors if name.endswith(".attn_k.weight"))
    values["attention_k_eq_v"] = any(name.replace("attn_k", "attn_v") not in gguf.tensors for name in keys_alone)
    values["tie_word_embeddings"] = "output.weight" not in gguf.tensors  # overrides the family's default
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise LoadError(f"{gguf.path} holds no token embedding, so it is not a whole model; use another file.")
    values["vocab_size"] = embedding.shape[0]
    types, head = (gguf.tensors.get(name) for name in ("token_types.weight", "cls.output.weight"))
    values["type_vocab_size"] = 0 if types is None else types.shape[0]
    values["num_labels"] = None if head is None else head.shape[0]
    values["has_score_dense"] = "cls.weight" in gguf.tensors
    if family == "llama":  # the architecture of other families, too
        names |= {key: prefix + theirs for key, theirs in _MISTRAL.items()}
        values |= {key: metadata.get(names[key]) or None for key in _MISTRAL}
        if values["num_local_experts"] is not None:
            values["model_type"] = "mixtral"
        elif values["sliding_window"] is not None:
            values["model_type"] = "mistral"
    return Fields({**values, **layout.implied(values)}, gguf.path, names)


def _rope_parameters(metadata: Mapping[str, object], prefix: str) -> dict[str, object]:
    rope = {ours: metadata[prefix + key] for ours, key in _ROPE_KEYS.items() if prefix + key in metadata}
    if "factor" not in rope and prefix + "rope.scale_linear" in metadata:  # the key of older files
        rope["factor"] = metadata[prefix + "rope.scale_linear"]
    # As in llama.cpp: without a type, scaling is linear; without a factor, or with factor 0, there is none.
    kind, factor = rope.setdefault("rope_type", "linear"), rope.get("factor") or 1.0
    if kind == "none" or (kind == "linear" and factor == 1):
        return {}
    if kind == "yarn":
        rope["factor"] = factor
    magnitude = metadata.get(prefix + "rope.scaling.attn_factor")
    if kind == "yarn" and isinstance(magnitude, float) and isinstance(factor, float) and factor >= 1:
        # In GGUF this factor multiplies yarn's own; in Hugging Face's files it replaces yarn's own.
        rope["attention_factor"] = magnitude * (1 + 0.1 * float(np.log(factor)))
    return rope


def _check_head_channels(gguf: GgufFile, prefix: str, attention: Attention) -> None:
    for key, meaning, wanted in (
        ("attention.value_length", "values", attention.head_dim),
        ("rope.dimension_count", "RoPE", attention.rotated),
    ):
        channels = gguf.metadata.get(prefix + key, wanted)
        if channels != wanted:
            raise LoadError(
                f"{gguf.path}: {prefix}{key} is {channels!r}, but keys have {attention.head_dim} channels per head; "
                f"another number for {meaning} is not supported."
            )


def _longrope(gguf: GgufFile, prefix: str) -> dict[str, object]:
    """Phi-3's RoPE, whose kind is not in the metadata."""
    rope: dict[str, object] = {key: list(_divisors(gguf, label)) for key, label in _LONGROPE.items()}
    factor, context = (gguf.metadata.get(f"{prefix}rope.scaling.{key}") for key in ("attn_factor", _ORIGINAL_CONTEXT))
    return {**rope, "rope_type": "longrope", "attention_factor": factor, "original_max_position_embeddings": context}


def _checked_divisors(gguf: GgufFile, attention: Attention) -> tuple[float, ...]:
    """Llama 3.1's RoPE as one divisor per channel pair, which the converter computed."""
    divisors, pairs = _divisors(gguf, _ROPE_DIVISORS), attention.rotated // 2
    if len(divisors) != pairs:
        raise LoadError(
            f"{gguf.path}: the tensor {_ROPE_DIVISORS} is {gguf.tensors[_ROPE_DIVISORS].dtype} ({len(divisors)},), "
            f"but RoPE needs F32 ({pairs},); use another file of the model."
        )
    return divisors


def _divisors(gguf: GgufFile, label: str) -> tuple[float, ...]:
    entry = gguf.tensors[label]
    if len(entry.shape) != 1 or entry.dtype != "F32":
        raise LoadError(
            f"{gguf.path}: the tensor {label} is {entry.dtype} {entry.shape}, but RoPE needs F32 and one dimension; "
            "use another file of the model."
        )
    divisors = _file(entry).view(entry.offset, entry.nbytes).view("<f4").astype(np.float64)
    if not (np.isfinite(divisors).all() and (divisors > 0).all()):
        raise LoadError(f"{gguf.path}: the tensor {label} holds values that are not positive numbers.")
    return tuple(float(divisor) for divisor in divisors)


def _tensors(gguf: GgufFile, config: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors under their Hugging Face names; tensors that the family lacks keep their own."""
    specs = [*tensors(replace(config, tied_head=False)).specs()]
    of_label = Counter(spec.gguf for spec in specs)  # tensors that are parts of one in the file have its name
    names = {
        spec.gguf: spec.taken.source if spec.taken is not None and of_label[spec.gguf] > 1 else spec.name
        for spec in specs
    }
    found = {}
    for label, entry in gguf.tensors.items():
        weight = gguf.tensors.get(f"{label.rpartition('.')[0]}.weight")
        if label.endswith((".scale", ".input_scale")) and weight is not None and weight.dtype == _SCALED:
            continue  # the scale is in the weight's factor; the inputs' scale is for kernels that round inputs, too
        factor = _factor(gguf, label.removesuffix("weight") + "scale") if entry.dtype == _SCALED else 1.0
        for part, tensor in _of_experts(entry):
            match = _LAYER_TENSOR.fullmatch(part)
            name = names.get(part, f"model.layers.{match[1]}.{match[2]}.{match[3]}{match[4] or ''}" if match else part)
            found[name] = tensor if factor == 1 else replace(tensor, factor=factor)
    return found


def _of_experts(entry: GgufTensor) -> Iterator[tuple[str, StoredTensor]]:
    """The name and the tensor of each expert in a tensor of all experts; a tensor that is none, under its own name."""
    file = _file(entry)
    if not entry.name.rpartition(".")[0].endswith("_exps") or len(entry.shape) < 2:
        yield entry.name, StoredTensor(file, entry.name, entry.shape, entry.dtype, entry.offset)
        return
    count, *shape = entry.shape
    for expert in range(count):
        at = entry.offset + entry.nbytes // count * expert
        yield f"{entry.name}[{expert}]", StoredTensor(file, entry.name, tuple(shape), entry.dtype, at)


def _factor(gguf: GgufFile, label: str) -> float:
    """The number in the tensor `label`; 1 if there is none."""
    if label not in gguf.tensors:
        return 1.0
    entry = gguf.tensors[label]
    if entry.dtype != "F32" or entry.nbytes != 4:
        raise LoadError(
            f"{gguf.path}: the tensor {label} is {entry.dtype} {entry.shape}, but a scale is one number in F32; use "
            "another file of the model."
        )
    return float(_file(entry).view(entry.offset, 4).view("<f4")[0])


def _file(entry: GgufTensor) -> FileBytes:
    assert entry.file is not None
    return entry.file
