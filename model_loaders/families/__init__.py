"""Model families, one module each. A file `families/NAME.py` makes the Hugging Face `model_type` NAME loadable.

Such a module holds `ARCHITECTURE`, the class name that its checkpoints carry, and `configure(fields) -> ModelConfig`.
Modules that begin with an underscore are helpers.
"""

from __future__ import annotations

import importlib
import pkgutil

from model_loaders.config import ModelConfig
from model_loaders.errors import LoadError
from model_loaders.fields import Fields


def families() -> tuple[str, ...]:
    """Names of the families that there are files for, sorted."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")))


def configure(fields: Fields) -> ModelConfig:
    """The model that a configuration in Hugging Face's vocabulary describes.

    Raises LoadError for a model type without a family file, a class other than the family's causal language model,
    and whatever the family itself cannot accept.
    """
    name = fields.text("model_type")
    if name not in families():
        raise LoadError(
            f"{fields.where} describes a model of type {name!r}, which is not supported; "
            f"supported are {', '.join(families())}."
        )
    module = importlib.import_module(f"{__name__}.{name}")
    classes = fields.texts("architectures")
    if classes and module.ARCHITECTURE not in classes:
        raise fields.refuse("architectures", f"but only {module.ARCHITECTURE} is supported for the type {name!r}")
    return module.configure(fields)
