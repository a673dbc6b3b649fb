"""How a model's states become the vector of a text, as its files say: those of sentence-transformers, or GGUF's."""

from __future__ import annotations

import json
from pathlib import Path

from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.fields import Fields, read_json
from polarlm.model_loaders.files.gguf_file import GgufFile

_GGUF = {1: "mean", 2: "cls", 3: "last"}
_KEYS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_NAMES = {"mean": "mean", "cls": "cls", "lasttoken": "last"}  # values of the key pooling_mode, in newer files
_ARITHMETIC = ("Transformer", "Pooling", "Normalize")  # modules whose results can be computed


def pooling_of_folder(folder: Path) -> str | None:
    """ "mean", "cls" or "last" of a folder with modules.json; None without that file.

    Raises LoadError for modules that change vectors in another way, and for another pooling.
    """
    path = folder / "modules.json"
    try:
        modules = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{path} cannot be read ({error}); download it again.") from None
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise LoadError(f"{path} should hold a list of objects; download it again.")
    found = None
    for module in modules:
        kind = str(module.get("type")).rpartition(".")[2]
        if kind not in _ARITHMETIC:
            raise LoadError(f"{path} has a module {kind!r}, which is not supported; use another embedding model.")
        if kind == "Pooling":
            where = folder / str(module.get("path")) / "config.json"
            found = _of_module(Fields(read_json(where), where))
    return found


def _of_module(fields: Fields) -> str:
    """The pooling in a module's configuration."""
    if fields.has("pooling_mode"):
        name = fields.text("pooling_mode")
        if name not in _NAMES:
            raise fields.refuse("pooling_mode", f"but only {', '.join(_NAMES)} are supported")
        return _NAMES[name]
    chosen = [key for key in fields.given() if key.startswith("pooling_mode_") and fields.flag(key, False)]
    if len(chosen) != 1 or chosen[0] not in _KEYS:
        raise LoadError(
            f"{fields.where} asks for {' and '.join(chosen) or 'no pooling'}, but one of {', '.join(_KEYS)} is "
            "supported; use another embedding model."
        )
    return _KEYS[chosen[0]]


def pooling_of_gguf(gguf: GgufFile) -> str | None:
    """ "mean", "cls" or "last" of a GGUF file; None if it says nothing, or that there is none."""
    kind = gguf.metadata.get(f"{gguf.metadata.get('general.architecture')}.pooling_type")
    return _GGUF.get(kind) if isinstance(kind, int) else None
