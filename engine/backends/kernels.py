"""The text of the CUDA kernels, as the compiler gets it: one string, and the options that go with it.

CuPy's cache of compiled kernels knows the string alone, so nothing of ours is ever `#include`d.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

# Of every compilation, beside the target architecture.
OPTIONS = ("--std=c++17",)


@cache
def folder() -> Path:
    """Where the CUDA sources are: inside the installed package, or beside it in a checkout.

    In an installed environment `cuda` beside the package is NVIDIA's: only ours has the prelude. FileNotFoundError if
    neither is there.
    """
    package = Path(__file__).resolve().parents[1]
    for place in (package / "_cuda", package.parent / "cuda"):
        if (place / "prelude.cuh").is_file():
            return place
    raise FileNotFoundError(f"{package / '_cuda'}: the CUDA sources are missing; install polarlm again")


def source(kernel: str, codec: str | None = None, **defines: int | float | str) -> str:
    """Constants, prelude, the codec's functions and `cuda/<kernel>.cu` as one text.

    defines: what the kernel's DEFINES line names. int as it is, float as the nearest float32, str as text (a type).
    Compilers report lines of the original files. FileNotFoundError when there is no such kernel or codec.
    """
    constants = [f"#define {name} {_literal(value)}\n" for name, value in sorted(defines.items())]
    codec_text = _text(f"codecs/{codec}.cuh") if codec else ""
    return "".join(constants) + prelude() + codec_text + _text(f"{kernel}.cu")


def prelude() -> str:
    """What stands before every kernel."""
    return _text("prelude.cuh")


def _text(name: str) -> str:
    return f'#line 1 "cuda/{name}"\n{(folder() / name).read_text(encoding="utf-8")}\n'


def _literal(value: int | float | str) -> str:
    """As C++ reads it. Hexadecimal digits say a float32 exactly."""
    return f"{float(np.float32(value)).hex()}f" if isinstance(value, float) else str(value)
