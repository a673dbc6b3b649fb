"""Rows of images against transformers in float32: in NumPy, in compiled kernels, and on the emulated GPU."""

from __future__ import annotations

from collections.abc import Generator
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.native.ops import NativeOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import Ops
from polarlm.engine.model.vision_encoders import ImageReader
from polarlm.engine.model.vision_encoders._patches import qwen_patches
from polarlm.engine.model.weights import load_vision_encoder
from polarlm.model_loaders import vision_encoders
from tests.conftest import FIXTURES
from tests.cuda.emulated import EmulatedDevice

NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/images.npz"))
TWO_FRAMES = [name for name in NAMES if name.startswith(("qwen", "glm"))]
# Products round their inputs to words of 12 bits, or to halves.
BACKENDS: dict[str, tuple[Any, float]] = {
    "numpy": (NumpyOps, 1e-6),
    "native": (lambda: NativeOps(1), 2**-11),
    "cuda": (lambda: CudaOps(EmulatedDevice()), 2**-10),
}


def read_vision_encoder(path: Path, ops: Ops) -> ImageReader:
    found = vision_encoders.vision_encoder_of(path)
    assert found is not None
    reader = load_vision_encoder(ops, *found)
    found[1].close()
    return reader


def finished(reading: Generator[int, None, Any]) -> tuple[Any, int]:
    """What units of work return, and how often they have yielded."""
    pauses = 0
    while True:
        try:
            next(reading)
        except StopIteration as end:
            return end.value, pauses
        pauses += 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_transformers(name: str, backend: str) -> None:
    make, allowed = BACKENDS[backend]
    allowed *= 2 if name.startswith("glm") else 1  # four products make its rows: float32 itself is off by 1e-6
    reader, reference = read_vision_encoder(FIXTURES / name, ops := make()), np.load(FIXTURES / name / "images.npz")
    for k in range(reference["images"] if backend != "cuda" else 1):
        pixels, wanted = reference[f"pixels_{k}"], [reference[f"rows_{k}"], *reference[f"added_{k}"]]
        shape = vision_encoders.fit(reader.encoder, *pixels.shape[1::-1])
        assert (shape.height, shape.width, shape.rows) == (*pixels.shape[:2], len(wanted[0]))
        rows, pauses = finished(reader.read(pixels, shape))
        assert pauses == len(vision_encoders.tensors(reader.encoder).layers)
        for ours, theirs in zip((rows.rows, *starmap(ops.linear, rows.added)), wanted, strict=True):
            assert np.abs(ops.to_host(ours) - theirs).max() <= allowed * np.abs(theirs).max()


@pytest.mark.parametrize("name", TWO_FRAMES)
def test_patches_are_those_of_the_processor(name: str) -> None:
    reader, reference = read_vision_encoder(FIXTURES / name, NumpyOps()), np.load(FIXTURES / name / "images.npz")
    pixels = reference["pixels_1"]
    shape = vision_encoders.fit(reader.encoder, *pixels.shape[1::-1])
    np.testing.assert_allclose(qwen_patches(reader.encoder, pixels, shape), reference["patches_1"], atol=1e-6)
