"""Log-probabilities of every family's tests on a GPU, beside how far the roundings of its kernels are from NumPy."""

from __future__ import annotations

import importlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polarlm.bench.gpu.setup import open_gpu
from polarlm.engine.errors import EngineError


@dataclass(frozen=True)
class FamilyError:
    """How far a model's log-probabilities of a text's tokens are from NumPy's: the median, and the difference that
    `share` of them stay below, by the kernels' roundings alone and on the GPU."""

    family: str
    cache_type: str
    share: float
    rounded: tuple[float, float]
    device: tuple[float, float]


def every() -> list[tuple[str, str]]:
    """Every model of the tests with each cache type. Raises EngineError without a checkout."""
    return list(_of_tests("tests.cuda.family_scores").ALL)


def measure_family(family: str, types: str, ops: Any = None, **more: Any) -> FamilyError:
    """The differences of one model. ops: None for this process's GPU. more: as `differences` takes it."""
    scores, tiny = _of_tests("tests.cuda.family_scores"), _of_tests("tests.tiny")
    with tempfile.TemporaryDirectory() as folder:
        path = tiny.make_model(Path(folder), family)
        rounded, device = scores.differences(path, types, ops or open_gpu().open()[0], **more)[:, :2].tolist()
    return FamilyError(family, types, scores.share(types), (rounded[0], rounded[1]), (device[0], device[1]))


def _of_tests(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise EngineError(f"the models lie among a checkout's tests ({error})") from None
