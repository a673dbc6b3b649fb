"""Loads a model from a path: configuration, weights, tokenizer and chat template, whatever the file format.

Its names are imported when they are first used: what only lists files starts without NumPy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import polarlm  # noqa: F401 - `model_loaders` alone is an alias

if TYPE_CHECKING:
    from polarlm.model_loaders.config import GenerationDefaults, ModelConfig, RopeConfig
    from polarlm.model_loaders.errors import LoadError
    from polarlm.model_loaders.files.weights import WeightSource
    from polarlm.model_loaders.model import (
        NO_VISION_ENCODER,
        Model,
        load,
        load_vision_encoder,
        load_weights,
        locate,
    )
    from polarlm.model_loaders.rope import rope_frequencies

__all__ = [
    "NO_VISION_ENCODER",
    "GenerationDefaults",
    "LoadError",
    "Model",
    "ModelConfig",
    "RopeConfig",
    "WeightSource",
    "load",
    "load_vision_encoder",
    "load_weights",
    "locate",
    "rope_frequencies",
]
_MODULES = {
    "GenerationDefaults": "config",
    "LoadError": "errors",
    "ModelConfig": "config",
    "RopeConfig": "config",
    "WeightSource": "files.weights",
    "rope_frequencies": "rope",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'polarlm.model_loaders' has no attribute {name!r}")
    return getattr(import_module(f"polarlm.model_loaders.{_MODULES.get(name, 'model')}"), name)
