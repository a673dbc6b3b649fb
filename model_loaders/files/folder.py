"""Reads a model from a folder in Hugging Face's layout: configuration, weights and generation defaults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from polarlm.model_loaders.config import GenerationDefaults, ModelConfig
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.families import configure, quantizations, table_name, take_apart
from polarlm.model_loaders.fields import Fields, read_json
from polarlm.model_loaders.files.pooling import dense_of_folder, with_dense
from polarlm.model_loaders.files.safetensors_source import INDEX, SINGLE, open_safetensors
from polarlm.model_loaders.files.tensors import StoredWeights
from polarlm.model_loaders.files.weights import fit

_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth")


def open_folder(folder: Path) -> tuple[ModelConfig, StoredWeights]:
    """The configuration and weights in a folder. Raises LoadError unless it is a plain checkpoint of a known family."""
    _refuse_other_layouts(folder)
    dense, folders = dense_of_folder(folder)
    config = replace(read_configuration(folder), dense=dense)
    weights = open_safetensors(folder)
    try:
        renamed = with_dense(weights.renamed(lambda name: table_name(config, name)), folders)
        return fit(config, renamed.changed(lambda tensors: take_apart(config, tensors)))
    except BaseException:
        weights.close()
        raise


def read_configuration(folder: Path) -> ModelConfig:
    """The configuration in config.json. Raises LoadError for an unknown family and for quantized weights."""
    fields = Fields(read_json(folder / "config.json"), folder / "config.json")
    quantization = fields.section("quantization_config")
    if quantization is not None and quantization.text("quant_method", "") not in quantizations(
        fields.text("model_type")
    ):
        raise LoadError(
            f"{fields.where} has a quantization_config, and weights quantized this way are not supported; "
            "use the model's F16 or BF16 weights, or a GGUF file."
        )
    return configure(fields)


def generation_defaults(folder: Path) -> GenerationDefaults:
    """The defaults in `generation_config.json`; all None if it does not exist.

    `do_sample: false` means greedy only if there is no temperature; in many files it is a leftover.
    """
    path = folder / "generation_config.json"
    fields = Fields(read_json(path, required=False), path)
    temperature = _number(fields, "temperature", 100.0)
    return GenerationDefaults(
        temperature=temperature,
        top_k=fields.integer("top_k", minimum=0) if fields.has("top_k") else None,
        top_p=_number(fields, "top_p", 1.0),
        min_p=_number(fields, "min_p", 1.0),
        repeat_penalty=_number(fields, "repetition_penalty", 100.0),
        greedy=not fields.flag("do_sample", True) and temperature is None,
    )


def _number(fields: Fields, key: str, maximum: float) -> float | None:
    return fields.number(key, maximum=maximum) if fields.has(key) else None


def _refuse_other_layouts(folder: Path) -> None:
    """Raises LoadError, with advice, unless the folder has a configuration and safetensors."""
    has_config = (folder / "config.json").is_file()
    if has_config and any((folder / name).is_file() for name in (SINGLE, INDEX)):
        return
    if (folder / "adapter_config.json").is_file():
        raise LoadError(
            f"{folder} holds an adapter (LoRA), not a model; give its base model, and this folder with --lora (lora in "
            "Python)."
        )
    if pickles := sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern)):
        raise LoadError(
            f"{folder} holds its weights as a pickle ({pickles[0]}), which can run any code when opened and is not "
            "read; use the model's safetensors files."
        )
    if files := sorted(folder.glob("*.gguf")):
        raise LoadError(f"{folder} holds GGUF files, not a folder of weights; give one of them, such as {files[0]}.")
    if not has_config:
        raise LoadError(f"{folder} has no config.json; give the folder that holds the model's config.json and weights.")
    raise LoadError(f"{folder} has no weights ({SINGLE}, or {INDEX} with its parts); download the model completely.")
