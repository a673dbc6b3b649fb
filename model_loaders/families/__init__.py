"""Model families, one module each. A file `families/NAME.py` makes the Hugging Face `model_type` NAME loadable.

Such a module defines

- `ARCHITECTURES`, the class names in its checkpoints, and `MODEL_TYPES` if its model types are not NAME alone;
- `configure(fields) -> ModelConfig`: sizes, and the arithmetic of a layer;
- `tensors(config) -> TensorTable`: the tensors of a file, by the slots that they fill;
- optionally `GGUF`, the layout of the family's GGUF files;
- optionally `PREFIXES`: prefixes of tensor names in some files → the table's prefixes, with {depth} for the number of
  the layer of `ModelConfig.mtp`;
- optionally `take_apart(config, stored)`: the table's tensors, found in the tensors of safetensors files, by name;
- optionally `IS_INTERLEAVED`: whether RoPE's pairs are neighbouring channels in safetensors files;
- optionally `ALTERNATE`: whether rows of gate and up projection do, in the tensors of all experts of a layer;
- optionally `QUANTIZATIONS`, the values of `quant_method` in a configuration whose weights it reads.

Modules that begin with an underscore are helpers.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.families import _eagle3, _gemma4_assistant
from polarlm.model_loaders.families._gguf import GgufLayout
from polarlm.model_loaders.families._unsupported import why_not
from polarlm.model_loaders.fields import Fields, usable
from polarlm.model_loaders.files.tensor_table import TensorTable
from polarlm.model_loaders.files.tensors import StoredTensor


def families() -> tuple[str, ...]:
    """Names of all families, sorted."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")))


def configure(fields: Fields) -> ModelConfig:
    """The ModelConfig of a configuration with Hugging Face's keys.

    Raises LoadError for a model type without a family file, for a class that is not the family's,
    and for values that the family does not support.
    """
    name = fields.text("model_type")
    module = _module_of_type(name)
    if module is None:
        reason = why_not(name, fields)
        raise LoadError(
            f"{fields.where} describes a model of type {name!r}, {reason or 'which is not supported'}; "
            f"supported are {', '.join(families())}."
        )
    classes = usable(lambda: fields.texts("architectures")) or []
    fields = fields.with_values({"architectures": classes})
    if classes and not set(module.ARCHITECTURES) & set(classes):
        supported = " or ".join(module.ARCHITECTURES)
        raise fields.refuse("architectures", f"but only {supported} is supported for the type {name!r}")
    return module.configure(fields)


def table_name(config: ModelConfig, name: str) -> str:
    """The family's name of the tensor that a safetensors file calls `name`."""
    prefixes: Mapping[str, str] = getattr(_module(config.family), "PREFIXES", {})
    for theirs, ours in prefixes.items():
        if name.startswith(theirs):
            return ours.format(depth=config.depth) + name.removeprefix(theirs)
    return name


def take_apart(config: ModelConfig, file_tensors: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """The tensors of safetensors files by name, those that hold several of the table's tensors as these. Raises
    LoadError for wrong shapes."""
    change = getattr(_module(config.family), "take_apart", None)
    return file_tensors if change is None else change(config, file_tensors)


def is_interleaved(config: ModelConfig) -> bool:
    """Whether RoPE's pairs are neighbouring channels in safetensors files."""
    return getattr(_module(config.family), "IS_INTERLEAVED", False)


def rows_alternate(config: ModelConfig) -> bool:
    """Whether rows of gate and up projection alternate in the tensor of all experts of a layer."""
    return getattr(_module(config.family), "ALTERNATE", False)


def quantizations(name: str) -> tuple[str, ...]:
    """The values of `quant_method` in a configuration of the type `name` whose weights can be read."""
    module = _module_of_type(name)
    return () if module is None else getattr(module, "QUANTIZATIONS", ())


def tensors(config: ModelConfig) -> TensorTable:
    """Every tensor of a model, by the slot that it fills."""
    if (head := config.eagle3 or config.assistant) is not None:
        own = tensors(replace(config, layers=config.layers[: config.depth], mtp=False, eagle3=None, assistant=None))
        kind: Any = _gemma4_assistant if head is config.assistant else _eagle3
        return replace(own, layers=(*own.layers, *kind.slots(head, config.hidden_size)))
    return _module(config.family).tensors(config)


def gguf_layouts() -> dict[str, tuple[str, GgufLayout]]:
    """GGUF architecture → family and layout."""
    layouts: dict[str, tuple[str, GgufLayout]] = {}
    for name in families():
        layout: GgufLayout | None = getattr(_module(name), "GGUF", None)
        if layout is not None:
            layouts |= dict.fromkeys((layout.architecture, *layout.other_architectures), (name, layout))
    return layouts


def _module_of_type(name: str) -> ModuleType | None:
    return next((m for m in map(_module, families()) if name in getattr(m, "MODEL_TYPES", (_name(m),))), None)


def _name(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


def _module(family: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{family}")
