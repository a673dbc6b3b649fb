"""A float32 copy of a quantized .gguf file, so that another engine computes with the same weights."""

from __future__ import annotations

import os
import tempfile
import zlib
from pathlib import Path

import gguf
import numpy as np
from tqdm import tqdm

from engine import EngineError
from model_loaders.user_dirs import CACHE_VARIABLE, cache_folder

# Keys that the writer sets itself, or that are wrong for the copy.
_NOT_COPIED = ("general.architecture", "general.alignment", "general.file_type", "general.quantization_version")


def float32_copy(source: Path) -> Path:
    """The float32 copy of a .gguf file in the cache folder, which is written if it does not exist yet.

    Raises EngineError where it cannot be stored.
    """
    folder = cache_folder()
    # Files of the same name may be in different folders, and a file may have been replaced.
    copy = folder / f"{source.stem}-{zlib.crc32(os.fsencode(source.resolve())):08x}-F32.gguf"
    if copy.is_file() and copy.stat().st_mtime >= source.stat().st_mtime:
        return copy
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # In the same folder, so that the finished file only has to be renamed.
        with tempfile.TemporaryDirectory(prefix="float32-", dir=folder) as temporary:
            unfinished = Path(temporary) / copy.name
            write_float32(source, unfinished)
            os.replace(unfinished, copy)
    except OSError as error:
        raise EngineError(
            f"The float32 copy of {source.name} cannot be stored in {folder} ({error.strerror or error}): free some "
            f"space, or set {CACHE_VARIABLE} to another folder"
        ) from None
    return copy


def write_float32(source: Path, target: Path) -> None:
    """Write all metadata of `source` to `target`, and all tensors in float32, one at a time."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, _text(reader, "general.architecture"))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for name, field in reader.fields.items():
        value = field.contents()
        empty = field.types[:1] == [gguf.GGUFValueType.ARRAY] and not value  # which the writer cannot express
        if name.startswith("GGUF.") or name in _NOT_COPIED or empty:
            continue
        writer.add_key_value(name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        shape = tensor.shape[::-1].tolist()  # GGUF names the innermost dimension first
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), 4 * int(tensor.n_elements))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    total = 4 * sum(int(tensor.n_elements) for tensor in reader.tensors)
    with tqdm(total=total, desc=f"Writing {target.name}", unit="B", unit_scale=True, leave=False) as bar:
        for tensor in reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            writer.write_tensor_data(np.ascontiguousarray(values, np.float32))
            bar.update(4 * int(tensor.n_elements))
    writer.close()


def _text(reader: gguf.GGUFReader, name: str) -> str:
    field = reader.get_field(name)
    if field is None:
        raise EngineError(f"The .gguf file has no {name}")
    return str(field.contents())
