"""Reads weights from safetensors files: one file, or several with an index.

Layout: eight bytes of header length, a JSON header, the data. The header is read here because the package's NumPy
loader does not support bfloat16 and returns whole tensors, while this loader converts slab by slab.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Collection, Iterable
from math import prod
from pathlib import Path
from typing import TypeGuard

from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.file_bytes import FileBytes
from polarlm.model_loaders.files.tensors import StoredTensor, StoredWeights

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PART = re.compile(r"model-\d{5}-of-(\d{5})\.safetensors")
_UNFINISHED = {".incomplete", ".part", ".partial", ".crdownload", ".download", ".aria2"}
_LOG = logging.getLogger(__name__)
_MAX_HEADER = 100_000_000  # bytes; the format's own limit
_MAX_DIMS = 8
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


def open_safetensors(folder: Path) -> StoredWeights:
    """All tensors of a model's folder. Raises LoadError for missing, truncated or hostile files."""
    wanted: dict[Path, set[str] | None]
    if (folder / SINGLE).is_file():
        wanted = {folder / SINGLE: None}
        if (folder / INDEX).is_file():
            _LOG.warning("%s has both %s and %s: the weights are read from the first", folder, SINGLE, INDEX)
    else:
        wanted = _shards(folder) if (folder / INDEX).is_file() else dict.fromkeys(numbered_parts(folder))
    files: list[FileBytes] = []
    tensors: dict[str, StoredTensor] = {}
    try:
        for path, names in wanted.items():
            files.append(FileBytes(path))
            header = read_header(files[-1])
            for name in header if names is None else names:
                if name not in header:
                    raise LoadError(f"{path} lacks the tensor {name!r}, which {INDEX} places there; download it again.")
                tensors[name] = header[name]
    except BaseException:
        for file in files:
            file.close()
        raise
    return StoredWeights(folder, tensors, files)


def _shards(folder: Path) -> dict[Path, set[str] | None]:
    """The files that the index names, each with the tensors that it should hold."""
    index = folder / INDEX
    weight_map = Fields.read(index).section("weight_map")
    if weight_map is None:
        raise LoadError(f"{index} lacks the key 'weight_map'; download it again.")
    shards: dict[Path, set[str] | None] = {}
    for name in weight_map.names():
        file = weight_map.text(name)
        if Path(file).name != file or "\\" in file or not file.isprintable() or not file.endswith(".safetensors"):
            raise LoadError(f"{index} names the file {file!r}, which is not a safetensors file in this folder.")
        names = shards.setdefault(folder / file, set())
        assert names is not None
        names.add(name)
    _check_complete(folder, shards, f"although {INDEX} names")
    return shards


def numbered_parts(folder: Path) -> list[Path]:
    """The parts of weights without an index, which their names number; none if there are none.

    Raises LoadError if some are missing.
    """
    parts = [part for path in sorted(folder.iterdir()) if (part := _PART.fullmatch(path.name)) is not None]
    if not parts:
        return []
    count = parts[-1][1]
    paths = [folder / f"model-{number:05}-of-{count}.safetensors" for number in range(1, int(count) + 1)]
    _check_complete(folder, paths, "although others are there without")
    return paths


def _check_complete(folder: Path, paths: Collection[Path], although: str) -> None:
    missing = [path for path in paths if not path.is_file()]
    if missing:
        several = len(missing) > 1
        which = f"{missing[0]} and {len(missing) - 1} more of {len(paths)} parts are" if several else f"{missing[0]} is"
        advice = interrupted(folder) or "download the model completely"
        raise LoadError(f"{which} missing, {although} {'them' if several else 'it'}; {advice}.")


def interrupted(folder: Path) -> str | None:
    """What to do about a download into a folder that has not finished; None if none is seen."""
    places = [*folder.iterdir(), *(folder / ".cache" / "huggingface" / "download").glob("*")]
    name = next((path.name for path in sorted(places) if path.suffix in _UNFINISHED), None)
    return None if name is None else f"a download has not finished ({name}): start it again"


def read_header(source: FileBytes) -> dict[str, StoredTensor]:
    """The table of tensors of one file. Raises LoadError if it is inconsistent or the file is truncated.

    As the format requires, the tensors must fill the data section without gaps or overlaps, so no tensor is larger
    than the file.
    """
    length = int.from_bytes(source.read(0, 8), "little")
    if source.size < 8 or length > _MAX_HEADER or 8 + length > source.size:
        raise LoadError(
            f"{source.path} is truncated or not a safetensors file: it has {source.size:,} bytes, "
            f"and its first eight give a header of {length:,}; download it again."
        )
    entries = _parse(source, source.read(8, length))
    end = 0
    tensors = {}
    placed = (_entry(source, name, entry, 8 + length) for name, entry in entries)
    for (start, stop), tensor in sorted(placed, key=lambda each: each[0]):
        if start != end:
            raise _damaged(source, f"the tensor {tensor.label!r} begins at byte {start:,} of the data, not at {end:,}")
        end = stop
        tensors[tensor.label] = tensor
    data_bytes = source.size - 8 - length
    if end > data_bytes:
        raise LoadError(
            f"{source.path} is truncated: its tensors take {end:,} bytes, but it has {data_bytes:,}; download it again."
        )
    if end < data_bytes:
        raise _damaged(source, f"{data_bytes - end:,} bytes follow the last tensor")
    return tensors


def _damaged(source: FileBytes, problem: str) -> LoadError:
    return LoadError(f"{source.path} is damaged: {problem}; download it again.")


def _parse(source: FileBytes, text: bytes) -> Iterable[tuple[str, object]]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        table = dict(pairs)
        if len(table) < len(pairs):
            raise _damaged(source, "a name occurs twice in its header")
        return table

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except LoadError:
        raise
    except (ValueError, RecursionError):
        raise _damaged(source, "its header is not JSON") from None
    if not isinstance(header, dict):
        raise _damaged(source, "its header is not a JSON object")
    header.pop("__metadata__", None)
    return header.items()


def _entry(source: FileBytes, name: str, entry: object, data_start: int) -> tuple[tuple[int, int], StoredTensor]:
    """One tensor with its range in the data section, checked except for the range's upper end."""
    if not isinstance(entry, dict):
        raise _damaged(source, f"its header describes the tensor {name!r} without a type, shape and place")
    dtype, shape, place = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise LoadError(
            f"{source.path}: the tensor {name!r} has the type {dtype!r}, which is not supported; "
            "use a copy of the model in F32, F16 or BF16."
        )
    if not _naturals(shape) or len(shape) > _MAX_DIMS:
        raise _damaged(source, f"the tensor {name!r} has the shape {shape!r}")
    if not _naturals(place) or len(place) != 2:
        raise _damaged(source, f"the tensor {name!r} has the place {place!r}")
    start, stop = place
    if stop - start != prod(shape) * _ITEM_BYTES[dtype]:
        raise _damaged(source, f"the tensor {name!r} of shape {tuple(shape)} in {dtype} takes {stop - start:,} bytes")
    return (start, stop), StoredTensor(source, name, tuple(shape), dtype, data_start + start)


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= sys.maxsize for item in value)
