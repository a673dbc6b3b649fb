"""The source text of a CUDA kernel as one string, and the compiler options.

CuPy's cache of compiled kernels is keyed by the string, so our own files are concatenated, never `#include`d.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import numpy as np

from polarlm.engine import weight_formats
from polarlm.engine.backends.origins import empty_block
from polarlm.engine.codecs import FULL
from polarlm.engine.records import Layout, struct_text

# At the top of a kernel: the files that precede it, on as many lines as it takes.
_JOINS = re.compile(r"^// JOINS: ((?:.+,\n// )*.+)\.$", re.MULTILINE)


OVERLAPS = "OVERLAPS"  # if defined, kernels wait for their predecessor by themselves, see `waits`

_TWINS = ("codecs",)  # folders whose files are named like their twins in Python

# Compiler options besides the target architecture.
OPTIONS = ("--std=c++17",)


@cache
def folder() -> Path:
    """The folder of the CUDA sources, next to `engine`. Raises FileNotFoundError if it is missing."""
    place = Path(__file__).resolve().parents[4] / "cuda"
    if not (place / "prelude.cuh").is_file():
        raise FileNotFoundError(f"{place}: the CUDA sources are missing; install polarlm again")
    return place


def source(
    kernel: str,
    keys: Layout | None = None,
    values: Layout | None = None,
    **defines: int | float | str,
) -> str:
    """One text of: constants, prelude, structs of codecs and of the weight format, the files that the kernel JOINS, and
    `<kernel>.cu`.

    keys, values: layouts of records; they define `KeyCodec` and `FullKeys`, `ValueCodec` and `FullValues`. defines: the
    constants that the kernel's DEFINES line names; an int is written as it is, a float as the nearest float32, a str (a
    type) as text. WEIGHT and SECOND may name weight formats, whose structs are included. Compiler messages show the
    lines of the original files. Raises FileNotFoundError for an unknown kernel or codec.
    """
    text = _text(f"{kernel}.cu")
    return source_from_text("".join(map(_text, joined_files(text))) + text, keys, values, **defines)


def joined_files(text: str) -> list[str]:
    """The names of the files that a kernel of this text JOINS."""
    match = _JOINS.search(text)
    return re.split(r",\s(?:// )?", match[1]) if match else []


def source_from_text(
    text: str, keys: Layout | None = None, values: Layout | None = None, **defines: int | float | str
) -> str:
    """`source` for a kernel that is given as text, not by name."""
    sides = {"Key": keys, "Value": values}
    readers = _structs(sides.values()) + _layouts(sides) + _weights(defines.get("WEIGHT"), defines.get("SECOND"))
    return _constants(defines) + prelude() + readers + text


def _constants(defines: Mapping[str, int | float | str]) -> str:
    return "".join(f"#define {name} {_literal(value)}\n" for name, value in sorted(defines.items()))


_PLAIN = {"f16": "__half", "bf16": "__nv_bfloat16"}  # formats of numbers → their type
_VALUES = (32, 256)  # of a block of codes that kernels read
_PAIRS = "PairTable"  # the struct of `pair_table.cuh`


@cache
def can_read(weight_format: str) -> bool:
    """Whether kernels can read matrices in this weight format: of numbers, or of codes and scales in whole bits."""
    format = weight_formats.find(weight_format)
    if format is None or format.unpack is None:
        return weight_format in _PLAIN
    return format.values in _VALUES and not (format.grid or format.runs)


def _weights(*names: object) -> str:
    """The text of the structs of the weight formats among `names`; empty for other types."""
    structs = [_weight_struct(str(name)) for name in names if can_read(str(name))]
    # A name for compiler messages: no such file exists.
    texts = [_text("plain_weights.cuh"), _text("packed_weights.cuh"), '#line 1 "cuda/weights.cuh"\n', *structs]
    return "".join(texts) if structs else ""


def _weight_struct(name: str) -> str:
    """The text of a format's struct: the constants of `packed_weights.cuh`, or the type of numbers."""
    if name in _PLAIN:
        return f"struct {name} : PlainWeights<{_PLAIN[name]}> {{}};\n"
    format = weight_formats.get(name)
    block, table = empty_block(format), format.table
    words = np.zeros(16, np.uint8) if table is None else table.view(np.uint8) ^ np.uint8(128)
    constants = {
        "VALUES": format.values,
        "BITS": format.bits,
        "GROUP": format.group,
        "ZERO": format.zero if table is None else 128,
        "SUBS": int(block.sub_scale is not None),
        "OFFSETS": int(block.offset is not None),
        "POWERS": int(block.scale.dtype == np.float32),
        "TABLED": int(table is not None),
        **{f"TABLE_{i}": word for i, word in enumerate(words.view("<i4").tolist())},
    }
    return f"{struct_text(f'{name}_blocks', constants)}struct {name} : PackedWeights<{name}_blocks> {{}};\n"


def _structs(layouts: Iterable[Layout | None]) -> str:
    """The text of the structs that read records of these layouts."""
    structs = {_struct_of(layout) for layout in layouts if layout}
    names = sorted({FULL} | structs - {_PAIRS})
    texts = ("fragments.cuh", "pair_table.cuh", *(f"codecs/{name}.cuh" for name in names))
    return "".join(map(_text, texts)) if structs else ""


def _struct_of(layout: Layout) -> str:
    """The name of the struct template that reads records of a layout: that of the codec's file, or any pair codec's."""
    codec = layout.record.codec
    return codec if f"codecs/{codec}.cuh" in _files() else _PAIRS


def _layouts(sides: Mapping[str, Layout | None]) -> str:
    """What defines the structs of each side ("Key", "Value") that has a layout."""
    layouts = {side: layout for side, layout in sides.items() if layout}
    texts = ['#line 1 "cuda/layouts.cuh"\n'] if layouts else []  # a name for compiler messages: no such file exists
    for side, layout in layouts.items():
        texts += [layout.text(f"{side}Layout"), layout.full.text(f"Full{side}Layout")]
        texts.append(f"using {side}Codec = {_struct_of(layout)}<{side}Layout>;\n")
        texts.append(f"using Full{side}s = f16<Full{side}Layout>;\n")
    return "".join(texts)


def waits(text: str, kernel: str) -> bool:
    """Whether `kernel` of a text waits for its predecessor by itself, so that it may be launched before that ends."""
    if not re.search(rf"^#define {OVERLAPS}\b", text, re.MULTILINE):
        return False
    _, _, rest = text.partition(f" {kernel}(" if f" {kernel}(" in text else f"\n{kernel}(")
    return "wait_for_previous();" in rest.split("__global__", 1)[0]


def prelude() -> str:
    """The text that precedes every kernel."""
    return _text("prelude.cuh")


def _text(name: str) -> str:
    """The text of a file of the folder, in ASCII: CuPy writes sources in the locale's encoding, which may be ASCII.

    Other characters, which only comments have, become question marks. Raises FileNotFoundError.
    """
    path = _files().get(name)
    if path is None:
        raise FileNotFoundError(f"{folder()}: no file {name}")
    text = path.read_text(encoding="utf-8").encode("ascii", "replace").decode("ascii")
    return f'#line 1 "cuda/{path.relative_to(folder()).as_posix()}"\n{text}\n'


@cache
def _files() -> dict[str, Path]:
    """File name → path. Files of codecs have their folder's name as prefix."""
    files = {}
    for path in folder().rglob("*.cu*"):
        parent = path.parent.name
        files[f"{parent}/{path.name}" if parent in _TWINS else path.name] = path
    return files


def _literal(value: int | float | str) -> str:
    """`value` as a C++ literal. A float is written in hexadecimal, which is exact."""
    return f"{float(np.float32(value)).hex()}f" if isinstance(value, float) else str(value)
