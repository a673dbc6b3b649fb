"""Safetensors that are quantized already: each file here reads the matrices of one format, tensor by tensor.

It defines `read(parts, settings)`: the tensors of a module and its quantization_config → its matrix, or None if they
are not of this format. What a configuration leaves unquantized has other tensors, and stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from types import ModuleType

from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensors import PLAIN, StoredTensor
from polarlm.model_loaders.weight_quantization import bitsandbytes, compressed_tensors, fp8, gptq, mlx, nvfp4
from polarlm.model_loaders.weight_quantization.matrix import numbers

_LAYOUTS = *(f"{name}-quantized" for name in ("pack", "int", "float", "naive", "nvfp4-pack")), "mixed-precision"
_OF_GPTQ = (  # keys of GPTQ and AWQ that say how weights were quantized, or that tensors say, too
    *("act_group_aware", "autoround_version", "backend", "batch_size", "block_name_to_quantize", "damp_percent"),
    *("cache_block_outputs", "data_type", "dataset", "desc_act", "do_fuse", "dynamic", "enable_minmax_tuning"),
    *("enable_quanted_input", "exllama_config", "fuse_max_seq_len", "gradient_accumulate_steps", "group_size"),
    *("iters", "lm_head", "low_gpu_mem_usage", "lr", "max_input_length", "meta", "minmax_lr", "model_seqlen"),
    *("model_file_base_name", "model_name_or_path", "module_name_preceding_first_block", "modules_to_not_convert"),
    *("modules_in_block_to_quantize", "modules_to_fuse", "nsamples", "pack_dtype", "pad_token_id", "scale_dtype"),
    *("seqlen", "static_groups", "sym", "tokenizer", "true_sequential", "use_exllama", "zero_point"),
)
_OF_FP8 = "activation_scheme", "ignored_layers", "kv_cache_scheme", "modules_to_not_convert", "scale_fmt"
_OF_GROUPS = "config_groups", "ignore", "kv_cache_scheme"
# Method → the formats that its files have, for keys of its configuration the values that are read, and other keys that
# are known: they say what tensors say, too, or nothing of weights.
_METHODS: dict[str, tuple[tuple[ModuleType, ...], Mapping[str, tuple[object, ...]], Collection[str]]] = {
    "awq": ((gptq,), {"bits": (4,), "version": ("gemm", "GEMM"), "format": ("gemm", "GEMM")}, _OF_GPTQ),
    "bitsandbytes": (
        (bitsandbytes,),
        {},
        (
            *("_load_in_4bit", "_load_in_8bit", "load_in_4bit", "load_in_8bit", "bnb_4bit_compute_dtype"),
            *("bnb_4bit_quant_storage", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "llm_int8_skip_modules"),
            *("llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "llm_int8_threshold"),
        ),
    ),
    "compressed-tensors": (
        (compressed_tensors, fp8, nvfp4),
        {"format": _LAYOUTS, "transform_config": ({}, {"config_groups": {}})},
        (*_OF_GROUPS, "global_compression_ratio", "quantization_status", "sparsity_config", "version"),
    ),
    "fbgemm_fp8": ((fp8,), {}, (*_OF_FP8, "activation_scale_ub")),
    "fp8": ((fp8,), {"fmt": ("e4m3",)}, _OF_FP8),
    "gptq": (
        (gptq,),
        {"bits": (4, 8), "checkpoint_format": ("gptq", "gptq_v2"), "format": ("gptq", "gptq_v2")},
        _OF_GPTQ,
    ),
    "mlx": ((mlx,), {"bits": (4, 8), "mode": ("affine",)}, ()),
    "modelopt": (
        (fp8, nvfp4),
        {"quant_algo": ("FP8", "NVFP4", "MIXED_PRECISION")},
        (*_OF_GROUPS, "exclude_modules", "group_size", "kv_cache_quant_algo", "producer", "quantized_layers"),
    ),
}
_SCALES_OF_CACHES = (".k_scale", ".v_scale", ".q_scale")  # for K/V in FP8, which is not how this engine keeps them
_LOG = logging.getLogger(__name__)


def _settings(fields: Fields) -> tuple[str, Fields] | None:
    """The method of a configuration and its settings; None if weights are not quantized."""
    settings = fields.section("quantization_config") or fields.section("quantization")
    if settings is None:
        return None
    return settings.text("quant_method", "mlx" if settings.has("group_size") else ""), settings


def check(fields: Fields, of_family: Collection[str]) -> None:
    """Raises LoadError for weights that neither this room nor the model's family, with its methods, reads."""
    found = _settings(fields)
    if found is None or found[0] in of_family:
        return
    name, settings = found
    if name not in _METHODS:
        raise LoadError(
            f"{fields.where} has a quantization_config of the kind {name!r}, and weights quantized this way are not "
            f"supported; use the model's F16 or BF16 weights, a GGUF file, or a copy in {', '.join(_METHODS)}."
        )
    for key, values in _METHODS[name][1].items():
        if settings.has(key) and settings.value(key) not in values:
            raise settings.refuse(key, f"but only {' or '.join(map(repr, values))} is supported")


def read_quantized(
    fields: Fields, file_tensors: Mapping[str, StoredTensor], known: Collection[str]
) -> dict[str, StoredTensor]:
    """The tensors of a model by name, in which each quantized matrix is one. known: names of the model's tensors.

    Raises LoadError if parts of a matrix are missing, or contradict the configuration.
    """
    found = _settings(fields)
    if found is None or found[0] not in _METHODS:
        return dict(file_tensors)
    name, settings = found
    modules: dict[str, dict[str, StoredTensor]] = {}
    for label, tensor in file_tensors.items():
        module, infix, suffix = label.partition(".weight.")
        module, suffix = (module, f"weight.{suffix}") if infix else label.rpartition(".")[::2]
        modules.setdefault(module, {})[suffix] = tensor
    tensors: dict[str, StoredTensor] = {}
    matrices: dict[str, StoredTensor] = {}
    for module, parts in modules.items():
        matrix = next(filter(None, (format.read(parts, settings) for format in _METHODS[name][0])), None)
        if matrix is not None:
            matrices[f"{module}.weight"] = matrix
            # Old GPTQ files have biases of zeros that their models lack.
            parts = {key: parts[key] for key in ("bias",) if key in parts}
            if f"{module}.bias" not in known and all(
                one.dtype in PLAIN and not numbers(one).astype(bool).any() for one in parts.values()
            ):
                continue
        tensors |= {f"{module}.{suffix}".removeprefix("."): tensor for suffix, tensor in parts.items()}
    if not matrices:
        raise LoadError(f"{fields.where} has a quantization_config of {name!r}, but no such tensor; download it again.")
    if any(matrix.dtype == "NF4" for matrix in matrices.values()):
        _LOG.warning("%s: the 16 numbers of NF4 are rounded to 8 bits, by at most 0.3 %% of the largest", fields.where)
    _, values, known_keys = _METHODS[name]
    of_modules = settings.sections() if name == "mlx" else ()
    settings.warn_of_unread((*values, *known_keys, *of_modules))
    others = {name: tensor for name, tensor in tensors.items() if not name.endswith(_SCALES_OF_CACHES)}
    return {**others, **matrices}
