"""Reads weights from safetensors files: one file, or several with an index.

Layout: eight bytes of header length, a JSON header, the data. The header is read here because the package's NumPy
loader does not support bfloat16 and returns whole tensors, while this loader converts slab by slab.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
_STRAY = 3  # a file of all weights has this part of the bytes of those in parts at least: they may be of a wider type
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


def open_safetensors(folder: Path, is_needed: Callable[[str], bool] = lambda name: True) -> StoredWeights:
    """All tensors of a model's folder. is_needed: whether the model cannot be without the tensor of this name.

    Raises LoadError for truncated or hostile files, and for missing ones that an index places a needed tensor in.
    """
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    index = read_index(folder / INDEX) if INDEX in sizes and SINGLE not in sizes else {}
    names = weight_files(sizes, set(index.values()))
    missing_files = [name for name in names if name not in sizes]
    if missing_files and (
        not index or any(is_needed(tensor) for tensor, name in index.items() if name in missing_files)
    ):
        raise _incomplete_error(folder, names, missing_files, f"{INDEX} names" if index else "others are there without")
    files: list[FileBytes] = []
    tensors: dict[str, StoredTensor] = {}
    try:
        for name in names or [SINGLE]:
            if name not in missing_files:
                files.append(FileBytes(folder / name))
                header = read_header(files[-1])
                tensors |= {one: header[one] for one in header if one not in tensors or index.get(one) == name}
        if not index.keys() & tensors.keys():
            index = {}  # of another model
        absent = [name for name in index if name not in tensors]
        if needed_name := next(filter(is_needed, absent), None):
            raise LoadError(
                f"{folder} lacks the tensor {needed_name!r}, which {INDEX} names; download the model again."
            )
    except BaseException:
        for file in files:
            file.close()
        raise
    for problem in _oddities(sizes, names, absent):
        _LOG.warning("%s has %s", folder, problem)
    return StoredWeights(folder, {name: tensors[name] for name in index or tensors if name in tensors}, files)


def weight_files(sizes: Mapping[str, int], indexed: Collection[str] = ()) -> list[str]:
    """The files with a model's weights, some of which may be missing; none if a folder has none.

    sizes: bytes of the folder's files, by name. indexed: the files that an index names. A whole set of parts, of those
    that the index names or else of those that their names number, is preferred to one with missing parts, and to a
    file of all weights that is so small that it strayed in.
    """
    groups: dict[int, int] = {}
    for name in sizes:
        if (part := _PART.fullmatch(name)) is not None:
            groups[int(part[1])] = groups.get(int(part[1]), 0) + 1
    sets = [sorted(indexed)] if indexed else []
    for count in sorted(groups, key=lambda count: (-groups[count], count)):
        sets.append([f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)])
    whole = next((names for names in sets if sizes.keys() >= set(names)), [])
    if SINGLE in sizes and _STRAY * sizes[SINGLE] >= sum(sizes[name] for name in whole):
        return [SINGLE]
    return whole or (sets[0] if sets else [])


def read_index(file: Path) -> dict[str, str]:
    """Tensor → the file that an index places it in. Raises LoadError."""
    weight_map = Fields.read(file).section("weight_map")
    if weight_map is None:
        raise LoadError(f"{file} lacks the key 'weight_map'; download it again.")
    index = {name: weight_map.text(name) for name in weight_map.names()}
    for name in index.values():
        if Path(name).name != name or "\\" in name or not name.isprintable() or not name.endswith(".safetensors"):
            raise LoadError(f"{file} names the file {name!r}, which is not a safetensors file in this folder.")
    return index


def _oddities(sizes: Mapping[str, int], names: Collection[str], absent: Sequence[str]) -> Iterator[str]:
    """What a user may not expect of the files that are read, `names`, and of those that are not. absent: tensors that
    the index alone has."""
    if SINGLE in names and INDEX in sizes:
        yield f"both {SINGLE} and {INDEX}: the weights are read from the first"
    if SINGLE in sizes and SINGLE not in names:
        yield f"a {SINGLE} that is too small for all weights: they are read from the parts beside it"
    strays = sorted(name for name in sizes if _PART.fullmatch(name) and name not in names)
    if strays and SINGLE not in names:
        others = f" and {len(strays) - 1} more" if len(strays) > 1 else ""
        yield f"{strays[0]}{others} beside the parts of its weights: it is not read"
    if absent:
        others = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        yield f"no file with the tensor {absent[0]!r}{others}, which {INDEX} names: the model does without"


def _incomplete_error(folder: Path, names: Collection[str], missing_files: Sequence[str], others: str) -> LoadError:
    several, first = len(missing_files) > 1, folder / missing_files[0]
    which = f"{first} and {len(missing_files) - 1} more of {len(names)} parts are" if several else f"{first} is"
    advice = download_advice(folder) or "download the model completely"
    return LoadError(f"{which} missing, although {others} {'them' if several else 'it'}; {advice}.")


def download_advice(folder: Path) -> str | None:
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
    entries_read = (_entry(source, name, entry, 8 + length) for name, entry in entries)
    for (start, stop), tensor in sorted(entries_read, key=lambda each: each[0]):
        if start != end:
            raise _damage_error(
                source, f"the tensor {tensor.label!r} begins at byte {start:,} of the data, not at {end:,}"
            )
        end = stop
        tensors[tensor.label] = tensor
    data_bytes = source.size - 8 - length
    if end > data_bytes:
        raise LoadError(
            f"{source.path} is truncated: its tensors take {end:,} bytes, but it has {data_bytes:,}; download it again."
        )
    if end < data_bytes:
        raise _damage_error(source, f"{data_bytes - end:,} bytes follow the last tensor")
    return tensors


def _damage_error(source: FileBytes, problem: str) -> LoadError:
    return LoadError(f"{source.path} is damaged: {problem}; download it again.")


def _parse(source: FileBytes, text: bytes) -> Iterable[tuple[str, object]]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        table = dict(pairs)
        if len(table) < len(pairs):
            raise _damage_error(source, "a name occurs twice in its header")
        return table

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except LoadError:
        raise
    except (ValueError, RecursionError):
        raise _damage_error(source, "its header is not JSON") from None
    if not isinstance(header, dict):
        raise _damage_error(source, "its header is not a JSON object")
    header.pop("__metadata__", None)
    return header.items()


def _entry(source: FileBytes, name: str, entry: object, data_start: int) -> tuple[tuple[int, int], StoredTensor]:
    """One tensor with its range in the data section, checked except for the range's upper end."""
    if not isinstance(entry, dict):
        raise _damage_error(source, f"its header describes the tensor {name!r} without a type, shape and place")
    dtype, shape, place = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise LoadError(
            f"{source.path}: the tensor {name!r} has the type {dtype!r}, which is not supported; "
            "use a copy of the model in F32, F16 or BF16."
        )
    if not _naturals(shape) or len(shape) > _MAX_DIMS:
        raise _damage_error(source, f"the tensor {name!r} has the shape {shape!r}")
    if not _naturals(place) or len(place) != 2:
        raise _damage_error(source, f"the tensor {name!r} has the place {place!r}")
    start, stop = place
    if stop - start != prod(shape) * _ITEM_BYTES[dtype]:
        raise _damage_error(
            source, f"the tensor {name!r} of shape {tuple(shape)} in {dtype} takes {stop - start:,} bytes"
        )
    return (start, stop), StoredTensor(source, name, tuple(shape), dtype, data_start + start)


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= sys.maxsize for item in value)
