"""The text of the CUDA kernels, as the compiler gets it: one string, and the options that go with it.

CuPy's cache of compiled kernels knows the string alone, so nothing of ours is ever `#include`d.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np

from engine.codecs import FULL
from engine.records import Layout

_JOINS = re.compile(r"^// JOINS: (.+)\.$", re.MULTILINE)  # in the head of a kernel: files that stand before it

_TWINS = ("codecs", "weights")  # folders of files that are called like their twins in Python

# Of every compilation, beside the target architecture.
OPTIONS = ("--std=c++17",)


@cache
def folder() -> Path:
    """Where the CUDA sources are: inside the installed package, or beside it in a checkout.

    In an installed environment `cuda` beside the package is NVIDIA's: only ours has the prelude. FileNotFoundError if
    neither is there.
    """
    package = Path(__file__).resolve().parents[2]
    for place in (package / "_cuda", package.parent / "cuda"):
        if (place / "prelude.cuh").is_file():
            return place
    raise FileNotFoundError(f"{package / '_cuda'}: the CUDA sources are missing; install polarlm again")


def source(kernel: str, keys: Layout | None = None, values: Layout | None = None, **defines: int | float | str) -> str:
    """Constants, prelude, what layouts and WEIGHT need, `cuda/<kernel>.cu` and the parts that it JOINS, as one text.

    keys, values: layouts of records; the text then has `KeyCodec` and `FullKeys`, `ValueCodec` and `FullValues`.
    defines: what the kernel's DEFINES line names. int as it is, float as the nearest float32, str as text (a type).
    Where WEIGHT is a weight format, the text has its struct.
    Compilers report lines of the original files. FileNotFoundError when there is no such kernel or codec.
    """
    text = _text(f"{kernel}.cu")
    joined = _JOINS.search(text)
    parts = [_text(name) for name in joined[1].split(", ")] if joined else []
    return with_readers("".join([*parts, text]), keys, values, **defines)


def with_readers(
    text: str, keys: Layout | None = None, values: Layout | None = None, **defines: int | float | str
) -> str:
    """`source` of a kernel that is given as a text."""
    constants = [f"#define {name} {_literal(value)}\n" for name, value in sorted(defines.items())]
    readers = _readers({"Key": keys, "Value": values}) + _weights(defines.get("WEIGHT"))
    return "".join(constants) + prelude() + readers + text


def _weights(name: object) -> str:
    """The struct of a weight format; of another type, nothing."""
    file = f"weights/{name}.cuh"
    return _text("plain_weights.cuh") + _text(file) if file in _files() else ""


def _readers(sides: Mapping[str, Layout | None]) -> str:
    """Side → its layout, where there is one, to the structs that read its records."""
    layouts = {side: layout for side, layout in sides.items() if layout}
    if not layouts:
        return ""
    names = sorted({FULL} | {layout.codec for layout in layouts.values()})
    texts = [_text(name) for name in ("fragments.cuh", "pair_table.cuh", *(f"codecs/{name}.cuh" for name in names))]
    texts.append('#line 1 "cuda/layouts.cuh"\n')  # this file is nowhere: it is written here
    for side, layout in layouts.items():
        texts += [layout.text(f"{side}Layout"), layout.full.text(f"Full{side}Layout")]
        texts.append(f"using {side}Codec = {layout.codec}<{side}Layout>;\n")
        texts.append(f"using Full{side}s = f16<Full{side}Layout>;\n")
    return "".join(texts)


def prelude() -> str:
    """What stands before every kernel."""
    return _text("prelude.cuh")


def _text(name: str) -> str:
    """A file of the folder, in ASCII: CuPy writes what it compiles in the locale's encoding, which may have no more.

    Only comments have other characters; they become question marks.
    """
    path = _files().get(name)
    if path is None:
        raise FileNotFoundError(f"{folder()}: there is no {name}")
    text = path.read_text(encoding="utf-8").encode("ascii", "replace").decode("ascii")
    return f'#line 1 "cuda/{path.relative_to(folder()).as_posix()}"\n{text}\n'


@cache
def _files() -> dict[str, Path]:
    """File name → where it is. What is found by a codec's or a format's name has its room before it."""
    files = {}
    for path in folder().rglob("*.cu*"):
        room = path.parent.name
        files[f"{room}/{path.name}" if room in _TWINS else path.name] = path
    return files


def _literal(value: int | float | str) -> str:
    """As C++ reads it. Hexadecimal digits say a float32 exactly."""
    return f"{float(np.float32(value)).hex()}f" if isinstance(value, float) else str(value)
