"""Reads a draft head of a file of its own, whose layers are then more of its model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from polarlm.model_loaders import weight_quantization
from polarlm.model_loaders.config import ModelConfig, RopeConfig
from polarlm.model_loaders.errors import LoadError, close_on_error
from polarlm.model_loaders.families import _eagle3 as eagle3
from polarlm.model_loaders.families import _gemma4_assistant as assistant
from polarlm.model_loaders.fields import Fields, describe, usable
from polarlm.model_loaders.files.folder import refuse_other_layouts
from polarlm.model_loaders.files.ggml_types import BY_NAME
from polarlm.model_loaders.files.gguf_file import GgufFile
from polarlm.model_loaders.files.gguf_source import EMBEDDING, ROPE_DIVISORS, divisors_of, fields_of
from polarlm.model_loaders.files.repository import Role, files_of, gguf_contents, repository_of, role_of_file
from polarlm.model_loaders.files.safetensors_source import open_safetensors
from polarlm.model_loaders.files.tensor_table import TensorSpec, TensorTable
from polarlm.model_loaders.files.tensors import StoredTensor, StoredWeights
from polarlm.model_loaders.files.weights import arrange, complete

_JOINED, _IDS = "fc.weight", "d2t"
_KEY = "draft_vocab_size"  # of the configurations of such heads alone
_UNUSED = ("t2d", "model.embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight", ROPE_DIVISORS)
_LAYER = re.compile(r"^(?:model\.)?(?:midlayer|layers\.0)\.")
_INTEGERS = {"I32": "<i4", "I64": "<i8"}


def with_eagle3(config: ModelConfig, weights: StoredWeights, path: Path) -> tuple[ModelConfig, StoredWeights]:
    """The configuration and weights of a model, with those of the EAGLE-3 head in a folder or a GGUF file. Raises
    LoadError for another kind of file, and for a head of another model."""
    gguf = None if path.is_dir() else GgufFile(path)
    if gguf is None:
        refuse_other_layouts(path)
    stored = open_safetensors(path) if gguf is None else StoredWeights(path, gguf.tensors, gguf.files)
    with close_on_error(stored):
        fields, is_gguf = _fields_of_folder(path) if gguf is None else _fields_of_gguf(gguf), gguf is not None
        tensors = {one if is_gguf else _name(one): stored.tensors[one] for one in stored.tensors}
        head = eagle3.configure(fields, config, tensors)
        if (ids := tensors.pop(_IDS, None)) is not None:
            head = replace(head, ids=_ids(ids, config, is_offset=not is_gguf))
        if is_gguf and ROPE_DIVISORS in tensors:
            divisors = divisors_of(tensors.pop(ROPE_DIVISORS))
            rope = replace(head.model.attention.rope or RopeConfig(), divisors=divisors)
            head = replace(head, model=head.model.with_attention(lambda one: replace(one, rope=rope)))
        tensors |= _parts(path, tensors.pop(_JOINED, None), len(head.layers), config)
        specs = TensorTable({}, eagle3.slots(head, config.hidden_size)).specs()
        names = {spec.gguf if is_gguf else spec.name.removeprefix(eagle3.PREFIX): spec for spec in specs}
        unused = {*_UNUSED, EMBEDDING}.__contains__
        weights = _join(weights, stored, tensors, names, "an EAGLE-3 head", unused, is_gguf=is_gguf)
    return replace(config, layers=(*config.layers, *head.model.layers), mtp=True, eagle3=head), weights


def with_assistant(config: ModelConfig, weights: StoredWeights, path: Path) -> tuple[ModelConfig, StoredWeights]:
    """The configuration and weights of a Gemma 4, with those of the assistant in a folder. Raises LoadError for another
    kind of file, and for an assistant of another model."""
    if not path.is_dir():
        raise LoadError(f"{path} is no folder: give an assistant's folder, with config.json and safetensors files.")
    refuse_other_layouts(path)
    fields = Fields.read(path / "config.json")
    weight_quantization.check(fields, ())
    config = assistant.configure(fields, config)
    assert config.assistant is not None
    table = TensorTable({}, assistant.slots(config.assistant, config.hidden_size))
    names = {spec.name.removeprefix(assistant.PREFIX): spec for spec in table.specs()}
    stored = open_safetensors(path)
    with close_on_error(stored):
        unused = assistant.UNUSED.match
        return config, _join(weights, stored, stored.tensors, names, "an assistant", unused)


# Kind → what it is called, whether a configuration is of one, and what reads it.
HEADS: dict[str, tuple[str, Callable[[Fields], bool], Callable[..., tuple[ModelConfig, StoredWeights]]]] = {
    "eagle3": ("EAGLE-3 head", lambda one: one.has(_KEY), with_eagle3),
    "assistant": ("assistant of Gemma 4", lambda one: one.value("model_type") in assistant.MODEL_TYPES, with_assistant),
}


def head_beside(kind: str, model: Path) -> Path | None:
    """The draft head of a kind beside a model: a folder in the model's or in its repository, or there an EAGLE-3 head's
    GGUF file."""
    root = model if model.is_dir() else repository_of(model)
    for file in sorted(root.glob("*/config.json")):
        if (fields := usable(partial(Fields.read, file))) is not None and HEADS[kind][1](fields):
            return file.parent
    contents = gguf_contents(files_of(root, ("*.gguf", "*/*.gguf")).values(), lambda one: role_of_file(root / one.path))
    heads = (root / one.files[0].path for one in contents if one.role is Role.HEAD and one.is_whole)
    return next(filter(_is_eagle3, heads), None) if kind == "eagle3" else None


def _join(
    weights: StoredWeights,
    stored: StoredWeights,
    tensors: Mapping[str, StoredTensor],
    names: Mapping[str, TensorSpec],
    what: str,
    is_unused: Callable[[str], object],
    *,
    is_gguf: bool = False,
) -> StoredWeights:
    """The weights of a model, with those of a head. tensors: what `stored` has, whose `names` have these specs."""
    if strange := [one for one in tensors if one not in names and not is_unused(one)]:
        raise LoadError(f"{stored.where} has the tensor {strange[0]!r}, which {what} does not have; give another head.")
    found = {names[one].name: tensors[one] for one in tensors if one in names}
    own = complete(StoredWeights(stored.where, found, ()), names.values(), what, is_gguf=is_gguf)
    own = {spec.name: arrange(own[spec.name], spec, is_gguf, is_gguf) for spec in names.values()}
    return StoredWeights(weights.where, {**weights.tensors, **own}, (*weights.open_files, *stored.open_files))


def _is_eagle3(path: Path) -> bool:
    with closing(GgufFile(path)) as gguf:
        return gguf.metadata.get("general.architecture") == eagle3.GGUF.architecture


def _fields_of_folder(folder: Path) -> Fields:
    fields = Fields.read(folder / "config.json")
    if not fields.has(_KEY):
        raise LoadError(f"{folder} is no EAGLE-3 head: its configuration has no {_KEY}; give a head's folder.")
    weight_quantization.check(fields, ())
    return fields


def _fields_of_gguf(gguf: GgufFile) -> Fields:
    arch = gguf.metadata.get("general.architecture")
    if arch != eagle3.GGUF.architecture:
        raise LoadError(f"{gguf.path} is no EAGLE-3 head: its architecture is {describe(arch)}; give a head's file.")
    sizes = gguf.metadata.get(f"{arch}.vocab_size"), gguf.metadata.get(f"{arch}.embedding_length")
    shapes = {name: tensor.shape for name, tensor in gguf.tensors.items()}
    shapes.setdefault(EMBEDDING, tuple(size if isinstance(size, int) else 1 for size in sizes))
    return fields_of(gguf.path, gguf.metadata, shapes, arch, arch, eagle3.GGUF)


def _name(theirs: str) -> str:
    """The name that Llama's files have for a tensor."""
    name = _LAYER.sub("model.layers.0.", theirs)
    return f"model.{name}" if name.startswith(("norm.", "embed_tokens.")) else name


def _ids(tensor: StoredTensor, config: ModelConfig, *, is_offset: bool) -> tuple[int, ...]:
    """The model's ids of the rows of the output head. is_offset: files have their differences to the rows' numbers."""
    where = f"{tensor.source.path}: the tensor {tensor.label}"
    if tensor.dtype not in _INTEGERS or len(tensor.shape) != 1:
        raise LoadError(f"{where} is {tensor.dtype} {tensor.shape}, but must have integers; give another head.")
    ids = tensor.source.view(tensor.offset, tensor.nbytes).view(_INTEGERS[tensor.dtype]).astype(np.int64)
    ids = ids + np.arange(len(ids)) if is_offset else ids
    if ((ids < 0) | (ids >= config.vocab_size)).any():
        raise LoadError(f"{where} names tokens that the model has not; give the head of this model.")
    return tuple(ids.tolist())


def _parts(path: Path, joined: StoredTensor | None, count: int, config: ModelConfig) -> Mapping[str, StoredTensor]:
    """The product with each of the model's hidden states."""
    e = config.hidden_size
    if joined is None or len(joined.shape) != 2 or joined.shape[1] != count * e:
        there = "no product with hidden states" if joined is None else f"{_JOINED} of shape {joined.shape}"
        raise LoadError(
            f"{path} has {there}, and this model {count} hidden states of {e} numbers; give the head of this model."
        )
    if joined.dtype not in BY_NAME or e % BY_NAME[joined.dtype].values:
        raise LoadError(f"{path}: {_JOINED} as {joined.dtype} cannot be divided at {e} columns; use a head in F16.")
    return {f"{_JOINED}[{at}]": joined.with_columns(at * e, e) for at in range(count)}
