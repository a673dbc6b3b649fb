"""Model families, one module each. A file `families/NAME.py` makes the Hugging Face `model_type` NAME loadable.

Such a module holds

- `ARCHITECTURES`, the class names that its checkpoints carry, and `MODEL_TYPES` where there is not NAME alone;
- `configure(fields) -> ModelConfig`, what a configuration describes: sizes, and the arithmetic of a layer;
- `tensors(config) -> TensorTable`, the tensors of a file, by the slots that they fill;
- `GGUF`, how llama.cpp's files of the family are written, if there are any;
- `PREFIXES`, what some of its files begin names of tensors with, and what the table has instead, if there are any.

Modules that begin with an underscore are helpers.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from types import ModuleType

from model_loaders.config import ModelConfig
from model_loaders.errors import LoadError
from model_loaders.families._gguf import GgufLayout
from model_loaders.families._unsupported import why_not
from model_loaders.fields import Fields
from model_loaders.tensor_table import TensorTable


def families() -> tuple[str, ...]:
    """Names of the families that there are files for, sorted."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")))


def configure(fields: Fields) -> ModelConfig:
    """The model that a configuration in Hugging Face's vocabulary describes.

    Raises LoadError for a model type without a family file, a class other than the family's causal language model,
    and whatever the family itself cannot accept.
    """
    name = fields.text("model_type")
    module = next((m for m in map(_module, families()) if name in getattr(m, "MODEL_TYPES", (_name(m),))), None)
    if module is None:
        reason = why_not(name, fields)
        raise LoadError(
            f"{fields.where} describes a model of type {name!r}, {reason or 'which is not supported'}; "
            f"supported are {', '.join(families())}."
        )
    classes = fields.texts("architectures")
    if classes and not set(module.ARCHITECTURES) & set(classes):
        supported = " or ".join(module.ARCHITECTURES)
        raise fields.refuse("architectures", f"but only {supported} is supported for the type {name!r}")
    return module.configure(fields)


def table_name(config: ModelConfig, name: str) -> str:
    """What the table of the family calls a tensor that a file of Hugging Face's calls `name`."""
    prefixes: Mapping[str, str] = getattr(_module(config.family), "PREFIXES", {})
    for theirs, ours in prefixes.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def tensors(config: ModelConfig) -> TensorTable:
    """Every tensor of a model, by the slots that they fill."""
    return _module(config.family).tensors(config)


def gguf_layouts() -> dict[str, tuple[str, GgufLayout]]:
    """By the architecture that a GGUF file calls itself: the family and how the file is written."""
    layouts = {}
    for name in families():
        layout: GgufLayout | None = getattr(_module(name), "GGUF", None)
        if layout is not None:
            layouts[layout.architecture] = name, layout
    return layouts


def _name(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


def _module(family: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{family}")
