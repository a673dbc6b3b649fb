"""How a model's states become the vector of a text, as files of sentence-transformers or a GGUF file say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from polarlm.model_loaders.config import Dense
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.fields import Fields, describe, read_json
from polarlm.model_loaders.files.gguf_file import GgufFile
from polarlm.model_loaders.files.safetensors_source import SINGLE

_GGUF = {1: "mean", 2: "cls", 3: "last"}
_KEYS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "last"}
_NAMES = {"mean": "mean", "cls": "cls", "lasttoken": "last"}  # values of the key pooling_mode, in newer files
_ARITHMETIC = ("Transformer", "Pooling", "Dense", "Normalize")  # modules whose results can be computed
_MOST_NUMBERS = 2**20  # in a vector that a module takes or gives


@dataclass(frozen=True)
class Prompts:
    """Texts that a model wants in front of texts, by names such as "query". default: the name for texts without one."""

    texts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None


NO_PROMPTS = Prompts()


def pooling_of_folder(folder: Path) -> str | None:
    """ "mean", "cls" or "last" of a folder with modules.json; None without that file.

    Raises LoadError for modules that change vectors in another way, and for another pooling.
    """
    poolings = []
    for fields in (Fields.read(where / "config.json") for where in _modules(folder, "Pooling")):
        poolings.append(_pooling_of_module(fields))
        fields.warn_of_unread(("embedding_dimension", "include_prompt", "word_embedding_dimension"))
    return poolings[-1] if poolings else None


def prompts_of_folder(folder: Path) -> Prompts:
    """The prompts in config_sentence_transformers.json; none without that file. Raises LoadError."""
    fields = Fields.read(folder / "config_sentence_transformers.json", required=False)
    prompts = fields.section("prompts")
    texts = {} if prompts is None else {name: prompts.text(name) for name in prompts.present()}
    default = fields.text("default_prompt_name") if fields.has("default_prompt_name") else None
    if default is not None and default not in texts:
        raise fields.refuse("default_prompt_name", "which is not among the prompts")
    if fields.has("truncate_dim"):
        raise fields.refuse("truncate_dim", "but vectors are whole here: delete the key, and ask for dimensions")
    fields.warn_of_unread(("__version__", "model_type", "similarity_fn_name"))
    for where in _modules(folder, "Pooling") if any(texts.values()) else ():
        Fields.read(where / "config.json").require("include_prompt", expected=True)
    return Prompts(texts, default)


def dense_of_folder(folder: Path) -> tuple[tuple[Dense, ...], list[Path]]:
    """The products after pooling, and the folders that hold their weights. Raises LoadError."""
    products, folders = [], _modules(folder, "Dense")
    for where in folders:
        fields = Fields.read(where / "config.json")
        for key in ("module_input_name", "module_output_name"):  # others are of a vector for each token
            fields.require(key, "sentence_embedding")
        fields.require("use_residual", False)
        activation = fields.text("activation_function", "Tanh").rpartition(".")[2]
        if activation not in ("Identity", "Tanh"):
            raise fields.refuse("activation_function", "but only Identity and Tanh are supported")
        inputs, outputs = (fields.integer(key, maximum=_MOST_NUMBERS) for key in ("in_features", "out_features"))
        products.append(Dense(inputs, outputs, bias=fields.flag("bias", True), tanh=activation == "Tanh"))
        fields.warn_of_unread()
        if not (where / SINGLE).is_file():
            raise LoadError(f"{where} has no {SINGLE}, the weights of its module; download the model completely.")
    return tuple(products), folders


def _modules(folder: Path, module_kind: str) -> list[Path]:
    """The folders of the modules of a kind in modules.json, in order; none without that file. Raises LoadError."""
    path = folder / "modules.json"
    modules = read_json(path, list, required=False)
    if not all(isinstance(one, dict) for one in modules):
        raise LoadError(f"{path} should hold a list of objects; download it again.")
    folders = []
    for module in modules:
        Fields(module, path).warn_of_unread(("idx", "name", "path", "type"))
        kind, where = str(module.get("type")).rpartition(".")[2], str(module.get("path"))
        if kind not in _ARITHMETIC:
            raise LoadError(
                f"{path} has a module {describe(kind)}, which is not supported; use another embedding model."
            )
        if Path(where).name != where.rstrip("/"):  # a file of somebody else may name a folder outside of this one
            raise LoadError(f"{path} has a module in {where!r}, which is not a folder next to it; download it again.")
        if kind == module_kind:
            folders.append(folder / where)
    return folders


def _pooling_of_module(fields: Fields) -> str:
    if fields.has("pooling_mode"):
        name = fields.text("pooling_mode")
        if name not in _NAMES:
            raise fields.refuse("pooling_mode", f"but only {', '.join(_NAMES)} are supported")
        return _NAMES[name]
    modes = [key for key in fields.present() if key.startswith("pooling_mode_") and fields.flag(key, False)]
    if len(modes) != 1 or modes[0] not in _KEYS:
        raise LoadError(
            f"{fields.where} asks for {' and '.join(modes) or 'no pooling'}, but one of {', '.join(_KEYS)} is "
            "supported; use another embedding model."
        )
    return _KEYS[modes[0]]


def pooling_of_gguf(gguf: GgufFile) -> str | None:
    """ "mean", "cls" or "last" of a GGUF file; None if it says nothing, or that there is none."""
    kind = gguf.metadata.get(f"{gguf.metadata.get('general.architecture')}.pooling_type")
    return _GGUF.get(kind) if isinstance(kind, int) else None


def dense_of_gguf(gguf: GgufFile) -> tuple[Dense, ...]:
    """The products after pooling of a GGUF file, dense_2 and dense_3 in llama.cpp's names."""
    shapes = [gguf.tensors[name].shape for name in ("dense_2.weight", "dense_3.weight") if name in gguf.tensors]
    return tuple(Dense(shape[1], shape[0]) for shape in shapes if len(shape) > 1)
