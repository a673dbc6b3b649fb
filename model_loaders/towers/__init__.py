"""Towers: the part of a model that reads images. A file `towers/NAME.py` is one kind; files of models name it.

A module defines

- `MODEL_TYPES`: the `model_type` of configurations whose `vision_config` it reads;
- `configure(fields, prepared) -> Tower`: from config.json, and preprocessor_config.json (empty if it is missing);
- `fit(tower, width, height) -> ImageShape`: what an image of so many pixels becomes;
- `tensors(tower) -> TensorTable`: its tensors; the names in a folder's files, and llama.cpp's in an mmproj file;
- optionally `PROJECTORS`: the values of `clip.projector_type` in mmproj files → how to read one.

What it computes is in `engine/model/towers/NAME.py`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple


class ImageShape(NamedTuple):
    """What an image becomes: the size in pixels that it is scaled to, and its rows of a prompt, row-major.

    grid: (height, width) of the rows, whose product is `rows`.
    """

    width: int
    height: int
    rows: int
    grid: tuple[int, int]


@dataclass(frozen=True)
class Tower:
    """A tower. Each kind has a subclass with its sizes.

    before, after: the text around the rows of an image in a prompt, where names of control tokens are these tokens.
    filter: how images are scaled, a name of Pillow's `Resampling`.
    """

    kind: str  # the file in model_loaders/towers
    outputs: int  # E of the decoder
    before: str
    after: str
    filter: str


def fit(tower: Tower, width: int, height: int) -> ImageShape:
    """What an image of so many pixels becomes."""
    shape: ImageShape = _module(tower.kind).fit(tower, width, height)
    return shape


def _module(kind: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{kind}")
