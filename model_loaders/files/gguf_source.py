"""Reads configuration and weights from a GGUF file, under Hugging Face's names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from polarlm.model_loaders import elementary
from polarlm.model_loaders.config import Attention, LatentAttention, ModelConfig
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.families import GgufLayout, configure, gguf_layouts, tensors
from polarlm.model_loaders.families._gguf import LOG_MULTIPLIER
from polarlm.model_loaders.families._unsupported import why_not
from polarlm.model_loaders.fields import Fields, describe
from polarlm.model_loaders.files.gguf_file import Beginning, GgufFile
from polarlm.model_loaders.files.pooling import dense_of_gguf
from polarlm.model_loaders.files.repository import Role, role_in_metadata
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
_STACKED = ("_exps", "attn_k_b", "attn_v_b")
_MISTRAL = {
    "sliding_window": "attention.sliding_window",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}
_OWN = "give the model's own GGUF file"
_ALTERNATIVES = {
    Role.PROJECTOR: f"{_OWN}, and this one as mmproj",
    Role.HEAD: _OWN,
    Role.ADAPTER: "give its base model, and this file as lora",
    Role.MATRIX: _OWN,
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(\w+)(\[\d+\])?")
_SCALED_TYPE = "NVFP4"  # a tensor `x.weight` of this type is multiplied by the number in `x.scale`, if that exists
ROPE_DIVISORS, EMBEDDING = "rope_freqs.weight", "token_embd.weight"
_LONGROPE = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}


def open_gguf(gguf: GgufFile, *, mtp: bool = False) -> tuple[ModelConfig, StoredWeights]:
    """(configuration, weights). mtp: whether `ModelConfig.mtp` is wanted. Raises LoadError for an unsupported
    architecture or feature, and for wrong tensors."""
    role = role_in_metadata(Beginning(gguf.metadata, True, len(gguf.tensors)), gguf.path.name) or Role.MODEL
    if role in _ALTERNATIVES:
        raise LoadError(f"{gguf.path} is {role.value}, not a model; {_ALTERNATIVES[role]}.")
    arch, family, layout = _family(gguf.metadata, gguf.path)
    shapes = {name: tensor.shape for name, tensor in gguf.tensors.items()}
    longrope = _longrope(gguf, arch) if shapes.keys() >= set(_LONGROPE.values()) else None
    fields = fields_of(gguf.path, gguf.metadata, shapes, arch, family, layout, longrope)
    config = replace(configure(fields), dense=dense_of_gguf(gguf))
    config = config.with_mtp() if mtp else config
    whole = next((one for one in config.attentions.values() if one.window is None), config.attention)
    _check_head_channels(gguf, arch, whole)
    if ROPE_DIVISORS in gguf.tensors:
        divisors, pairs = divisors_of(gguf.tensors[ROPE_DIVISORS]), whole.rotated // 2
        if len(divisors) != pairs:
            raise LoadError(
                f"{gguf.path}: the tensor {ROPE_DIVISORS} is {gguf.tensors[ROPE_DIVISORS].dtype} "
                f"({len(divisors)},), but RoPE needs F32 ({pairs},); use another file of the model."
            )

        def divide(one: Attention) -> Attention:
            has_others = one.rope is None or (one.rope, one.rotated) != (whole.rope, whole.rotated)
            return one if has_others else replace(one, rope=one.rope and replace(one.rope, divisors=divisors))

        config = config.with_attention(divide)
    weights = StoredWeights(gguf.path, _tensors(gguf, config), gguf.files)
    return fit(config, weights, interleaved=layout.is_interleaved(config), is_gguf=True)


def sizes_from_beginning(beginning: Beginning, where: str) -> ModelConfig | None:
    """The configuration in the beginning of a file, whose sizes alone are valid; None if they are not there.

    where: the file's name, for errors. Raises LoadError for an unsupported architecture or feature.
    """
    metadata = beginning.metadata
    if "general.architecture" not in metadata:
        return None
    arch, family, layout = _family(metadata, where)
    rows, columns = (metadata.get(f"{arch}.{key}") for key in ("vocab_size", _KEYS["hidden_size"]))
    shape = tuple(number if isinstance(number, int) else 1 for number in (rows, columns))
    try:
        return configure(fields_of(where, metadata, {EMBEDDING: shape}, arch, family, layout))
    except LoadError:
        return None  # the whole file may have what its beginning lacks


def _family(metadata: Mapping[str, object], where: str | Path) -> tuple[str, str, GgufLayout]:
    """(architecture, family, layout). Raises LoadError for an unsupported architecture or feature."""
    arch, layouts = metadata.get("general.architecture"), gguf_layouts()
    if not isinstance(arch, str) or arch not in layouts:
        reason = why_not(arch) if isinstance(arch, str) else None
        raise LoadError(
            f"{where} holds a model of architecture {describe(arch)}, {reason or 'which is not supported'}; "
            f"supported are {', '.join(sorted(layouts))} (older files of Mistral call themselves llama)."
        )
    family, layout = layouts[arch]

    def is_on(key: str) -> bool:
        return bool(metadata.get(f"{arch}.{key}"))

    if is_on("expert_count") and "expert_count" not in layout.keys.values() and arch != "llama":
        raise LoadError(f"{where} holds a mixture of experts, which {arch} models have not; use another file.")
    if metadata.get(f"{arch}.attention.causal") is False and "layer_norm_eps" not in layout.keys:
        raise LoadError(
            f"{where} holds an embedding model, whose tokens attend to later ones ({arch}.attention.causal is false): "
            "it cannot generate text; use a generative model."
        )
    if is_on(LOG_MULTIPLIER) and LOG_MULTIPLIER not in layout.keys.values():
        raise LoadError(f"{where} asks for yarn_log_multiplier, a kind of RoPE that is not supported.")
    return arch, family, layout


def fields_of(
    where: str | Path,
    metadata: Mapping[str, object],
    shapes: Mapping[str, tuple[int, ...]],
    arch: str,
    family: str,
    layout: GgufLayout,
    longrope: Mapping[str, object] | None = None,
) -> Fields:
    """The metadata under Hugging Face's keys, with the file's own keys for error messages. shapes: of its tensors."""
    keys = {**_KEYS, **layout.keys}
    names = {ours: f"{arch}.{theirs}" for ours, theirs in {**keys, **_ROPE_KEYS}.items()}
    values: dict[str, object] = {ours: metadata.get(names[ours]) for ours in keys}
    names |= {"rope_parameters": f"{arch}.rope.scaling", "model_type": "general.architecture"}
    if longrope is not None:
        names |= _LONGROPE
    if len(shapes.get(EMBEDDING, ())) != 2:
        raise LoadError(f"{where} holds no token embedding, so it is not a whole model; use another file.")
    values |= {"model_type": family, "gguf_architecture": arch, **_said_by_tensors(shapes)}
    values["rope_parameters"] = _rope_parameters(metadata, arch) if longrope is None else longrope
    if family == "llama":  # the architecture of other families, too
        names |= {key: f"{arch}.{theirs}" for key, theirs in _MISTRAL.items()}
        values |= {key: metadata.get(names[key]) or None for key in _MISTRAL}
        if values["num_local_experts"] is not None:
            values["model_type"] = "mixtral"
        elif values["sliding_window"] is not None:
            values["model_type"] = "mistral"
    return Fields({**values, **layout.implied_values(values)}, where, names)


def _said_by_tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    """Values that files say by the tensors that they have. shapes: by the tensors' names."""
    keys_alone = (name for name in shapes if name.endswith(".attn_k.weight"))
    return {
        "attention_bias": any(f"blk.0.attn_{one}.bias" in shapes for one in ("q", "qkv")),
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in shapes,
        "attention_k_eq_v": any(name.replace("attn_k", "attn_v") not in shapes for name in keys_alone),
        "tie_word_embeddings": "output.weight" not in shapes,  # overrides the family's default
        "vocab_size": shapes[EMBEDDING][0],
        "type_vocab_size": shapes.get("token_types.weight", (0,))[0],
        "num_labels": next(iter(shapes.get("cls.output.weight", ())), None),
        "has_score_dense": "cls.weight" in shapes,
    }


def _rope_parameters(metadata: Mapping[str, object], arch: str) -> dict[str, object]:
    prefix = f"{arch}."
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
        rope["attention_factor"] = magnitude * (1 + 0.1 * float(elementary.log(factor)))
    return rope


def _check_head_channels(gguf: GgufFile, arch: str, attention: Attention) -> None:
    for key, meaning, expected in (
        ("attention.value_length", "values", attention.head_dim),
        ("rope.dimension_count", "RoPE", attention.rotated),
    ):
        if key == "attention.value_length" and isinstance(attention, LatentAttention):
            continue  # its configuration is made of it
        channels = gguf.metadata.get(f"{arch}.{key}", expected)
        if channels != expected:
            raise LoadError(
                f"{gguf.path}: {arch}.{key} is {describe(channels)}, but keys have {attention.head_dim} channels per "
                f"head; another number for {meaning} is not supported."
            )


def _longrope(gguf: GgufFile, arch: str) -> dict[str, object]:
    """Phi-3's RoPE, whose kind is not in the metadata."""
    rope: dict[str, object] = {key: list(divisors_of(gguf.tensors[label])) for key, label in _LONGROPE.items()}
    factor, context = (gguf.metadata.get(f"{arch}.rope.scaling.{key}") for key in ("attn_factor", _ORIGINAL_CONTEXT))
    return {**rope, "rope_type": "longrope", "attention_factor": factor, "original_max_position_embeddings": context}


def divisors_of(entry: StoredTensor) -> tuple[float, ...]:
    """RoPE as one divisor per channel pair, which the converter computed."""
    where = f"{entry.source.path}: the tensor {entry.label}"
    if len(entry.shape) != 1 or entry.dtype != "F32":
        raise LoadError(
            f"{where} is {entry.dtype} {entry.shape}, but RoPE needs F32 and one dimension; "
            "use another file of the model."
        )
    divisors = entry.source.view(entry.offset, entry.nbytes).view("<f4").astype(np.float64)
    if not (np.isfinite(divisors).all() and (divisors > 0).all()):
        raise LoadError(f"{where} holds values that are not positive numbers.")
    return tuple(float(divisor) for divisor in divisors)


def _tensors(gguf: GgufFile, config: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors under their Hugging Face names; tensors that the family lacks keep their own."""
    specs = [*tensors(replace(config, tied_head=False)).specs()]
    spec_counts = Counter(spec.gguf for spec in specs)  # tensors that are parts of one in the file have its name
    names = {
        spec.gguf: spec.row_parts.source if spec.row_parts is not None and spec_counts[spec.gguf] > 1 else spec.name
        for spec in specs
    }
    parts = (spec.row_parts for spec in specs if spec.row_parts is not None)
    names |= {part.gguf: part.source for part in parts if part.gguf}
    file_tensors = {}
    for label, entry in gguf.tensors.items():
        weight = gguf.tensors.get(f"{label.rpartition('.')[0]}.weight")
        if label.endswith((".scale", ".input_scale")) and weight is not None and weight.dtype == _SCALED_TYPE:
            continue  # the scale is in the weight's factor; the inputs' scale is for kernels that round inputs, too
        factor = _factor(gguf, label.removesuffix("weight") + "scale") if entry.dtype == _SCALED_TYPE else 1.0
        for part, tensor in _expert_tensors(entry):
            match = _LAYER_TENSOR.fullmatch(part)
            name = names.get(part, f"model.layers.{match[1]}.{match[2]}.{match[3]}{match[4] or ''}" if match else part)
            file_tensors[name] = tensor if factor == 1 else replace(tensor, factor=factor)
    return file_tensors


def _expert_tensors(whole: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """The name and the tensor of each expert in a tensor of all experts, or of each head in one of all heads; a tensor
    that is none, under its own name."""
    if not whole.label.rpartition(".")[0].endswith(_STACKED) or len(whole.shape) < 2:
        yield whole.label, whole
        return
    count, *shape = whole.shape
    for expert in range(count):
        offset = whole.offset + whole.nbytes // count * expert
        yield f"{whole.label}[{expert}]", replace(whole, shape=tuple(shape), offset=offset)


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
    return float(entry.source.view(entry.offset, 4).view("<f4")[0])
