"""Reads a model from a folder in Hugging Face's layout: configuration and weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from polarlm.model_loaders import weight_quantization
from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.families import configure, is_interleaved, quantizations, table_name, take_apart
from polarlm.model_loaders.families import tensors as table_of
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.pooling import dense_of_folder
from polarlm.model_loaders.files.repository import GgufContent, Role, files_of, gguf_contents, role_of_file
from polarlm.model_loaders.files.safetensors_source import (
    INDEX,
    SINGLE,
    download_advice,
    open_safetensors,
    weight_files,
)
from polarlm.model_loaders.files.tensors import StoredWeights
from polarlm.model_loaders.files.weights import fit, is_needed

_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth")


def open_folder(folder: Path, *, mtp: bool = False) -> tuple[ModelConfig, StoredWeights]:
    """The configuration and weights in a folder. mtp: whether `ModelConfig.mtp` is wanted. Raises LoadError unless it
    is a plain checkpoint of a known family."""
    try:
        refuse_other_layouts(folder)
    except OSError as error:
        raise LoadError(f"{folder} cannot be read: {error.strerror or error}.") from error
    dense, folders = dense_of_folder(folder)
    config = replace(read_configuration(folder), dense=dense)
    config = config.with_mtp() if mtp else config
    weights = open_safetensors(folder, partial(is_needed, config))
    try:
        tensors = {table_name(config, name): tensor for name, tensor in weights.tensors.items()}
        names = {spec.name for spec in table_of(config).specs()}
        tensors = weight_quantization.read_quantized(Fields.read(folder / "config.json"), tensors, names)
        for number, module in enumerate(map(open_safetensors, folders)):
            for name, tensor in module.tensors.items():
                tensors[f"model.dense.{number}.{name.removeprefix('linear.')}"] = tensor
            weights = StoredWeights(folder, tensors, (*weights.open_files, *module.open_files))
        stored = StoredWeights(folder, take_apart(config, tensors), weights.open_files)
        return fit(config, stored, interleaved=is_interleaved(config))
    except BaseException:
        weights.close()
        raise


def read_configuration(folder: Path) -> ModelConfig:
    """The configuration in config.json. Raises LoadError for a family and for a quantization that are not read."""
    fields = Fields.read(folder / "config.json")
    weight_quantization.check(fields, quantizations(fields.text("model_type")))
    return configure(fields)


def refuse_other_layouts(folder: Path) -> None:
    """Raises LoadError, with advice, unless the folder has a configuration and safetensors."""
    has_config = (folder / "config.json").is_file()
    has_weights = (folder / INDEX).is_file() or _has_weights(folder)
    if has_config and has_weights:
        return
    if (folder / "adapter_config.json").is_file():
        raise LoadError(
            f"{folder} holds an adapter (LoRA), not a model; give its base model, and this folder with --lora (lora in "
            "Python)."
        )
    ggufs = _ggufs(folder, ("*.gguf",))
    if models := _models(folder, ggufs):
        raise LoadError(f"{folder} holds GGUF files, not a folder of weights; give one of them, such as {models[0]}.")
    if ggufs and ggufs[0].role is Role.MODEL:
        raise LoadError(f"{ggufs[0].files[0].name} in {folder} is {ggufs[0].why_no_model()}; download them all.")
    if ggufs:
        raise LoadError(
            f"{folder} holds only {ggufs[0].role.value} ({ggufs[0].files[0].name}); give the model's own GGUF file."
        )
    if not has_weights and (advice := download_advice(folder)):
        raise LoadError(f"{folder} has no complete weights; {advice}.")
    if not has_config and is_model(folder.parent):
        raise LoadError(f"{folder} is only a part of the model in {folder.parent}; give that folder.")
    if pickles := sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern)):
        raise LoadError(
            f"{folder} holds its weights as a pickle ({pickles[0]}), which can run any code when opened and is not "
            "read; use the model's safetensors files."
        )
    for name in ("config.json", SINGLE):
        if (folder / name).is_symlink() and not (folder / name).exists():
            raise LoadError(f"{folder / name} is a link to a file that does not exist; download the model again.")
    others = [file.name for file in _visible(folder, "*.safetensors") if file.name != SINGLE]
    if others and not has_weights:
        advice = f"if {others[0]} holds all of its weights, call it so, and otherwise download the model completely"
        if others[0].startswith("consolidated"):
            advice = f"{others[0]} is in Mistral's layout, which is not read: take the files that begin with model"
        raise LoadError(f"{folder} has no {SINGLE}; {advice}.")
    if not has_config and (models := _models_below(folder)):
        raise LoadError(f"{folder} is not a model but holds some; give one, such as {models[0]}.")
    if has_weights:
        raise LoadError(f"{folder} has weights but no config.json; put the model's config.json next to them.")
    if not has_config:
        raise LoadError(f"{folder} has no config.json; give the folder that holds the model's config.json and weights.")
    raise LoadError(f"{folder} has no weights ({SINGLE}, or {INDEX} with its parts); download the model completely.")


def _models_below(folder: Path) -> list[Path]:
    """The models in folders below; the hub's cache has a folder for each commit."""
    cache = next((one for one in (folder, *folder.parents) if one.name.startswith("models--")), folder)
    subfolders = [
        one for steps in ("*", "snapshots/*", "*/snapshots/*") for one in _visible(cache, steps) if one.is_dir()
    ]
    folders = [one for one in subfolders if is_model(one)]
    return folders or [file for one in subfolders for file in _models(one, _ggufs(one, ("*.gguf", "*/*.gguf")))]


def is_model(folder: Path) -> bool:
    """Whether a folder has a configuration and weights as safetensors."""
    return (folder / "config.json").is_file() and _has_weights(folder)


def _has_weights(folder: Path) -> bool:
    return bool(weight_files({path.name: 0 for path in _visible(folder, "*.safetensors") if path.is_file()}))


def _ggufs(folder: Path, steps: tuple[str, ...]) -> list[GgufContent]:
    """What the GGUF files of a folder hold, by their paths."""
    contents = gguf_contents(files_of(folder, steps).values(), lambda file: role_of_file(folder / file.path))
    return sorted(contents, key=lambda one: (one.role is not Role.MODEL, one.files[0].path))


def _models(folder: Path, contents: list[GgufContent]) -> list[Path]:
    """The models among what a folder holds, of those in parts the first file."""
    return [folder / one.files[0].path for one in contents if one.is_model]


def _visible(folder: Path, pattern: str) -> list[Path]:
    """The files and folders of a pattern, without hidden ones: macOS leaves a "._name" next to each name."""
    return [path for path in sorted(folder.glob(pattern)) if not path.name.startswith(".")]
