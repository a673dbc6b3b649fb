"""Drafted and plain runs of 300 prompts on each backend of a CPU, with every cache type: the same text and codes."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm import Engine, SamplingParams
from polarlm.engine import codecs
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import Ops
from polarlm.engine.outputs import Chunk, Completion, fold
from polarlm.engine.state.cache_types import PRESETS
from tests.cpu import CpuOps
from tests.random_model import random_model
from tests.requests.drafters import ANEW, Known, Unpaced, drafting, stored
from tests.tiny import VOCABULARY, forget, load_tiny

MODULES = [each.name for each in pkgutil.iter_modules(codecs.__path__) if not each.ispkg]
NAMES = [name for module in MODULES for name in importlib.import_module(f"{codecs.__name__}.{module}").NAMES]
WIDE = ("q8_0", "q4_0", "kivi4")  # take blocks and heads that are multiples of 32


def types_of(name: str) -> str:
    """Cache types of keys and values, of which one is `name`."""
    serves = codecs.get(name).serves
    return name if len(serves) == 2 else f"{name}/ring4" if "k" in serves else f"ring4/{name}"


TYPES = [*map(types_of, NAMES), *PRESETS]
PROMPTS = 300 // len(TYPES) + 1
CLOSE = 0.02  # nats: a best and a second token between which rounding may decide
IN_NUMPY = ("kivi4", "polarquant-online")  # no compiled kernel attends to these
PathOf = Callable[[str], Path]  # from a cache type to a model
PARAMS = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


def backends() -> list[type]:
    return list(dict.fromkeys([NumpyOps, CpuOps]))


def prompts(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(5, VOCABULARY, rng.integers(1, 40)).tolist() for _ in range(PROMPTS)]


def answers(engine: Engine, asked: Sequence[Sequence[int]]) -> list[Completion]:
    forget(engine)
    trays: list[list[Chunk | Exception]] = [[] for _ in asked]
    for prompt, tray in zip(asked, trays, strict=True):
        engine.submit(prompt, PARAMS, ANEW, into=tray)
    while engine.work():
        pass
    return [fold(tray) for tray in trays]


@pytest.fixture(params=backends(), ids=lambda ops: ops.__module__.split(".")[-2])
def ops(request: pytest.FixtureRequest) -> Ops:
    return request.param()


@pytest.fixture(scope="module")
def wide_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads of 64 channels."""
    return random_model(tmp_path_factory.mktemp("wide"))


@pytest.fixture
def path_of(tiny_path: Path, wide_path: Path) -> PathOf:
    return lambda type: wide_path if type in WIDE else tiny_path


def settings(type: str) -> dict[str, Any]:
    block = 32 if type in WIDE else 16
    return {"block_size": block, "ctx_size": 800, "parallel": 8, "calibration": False, "cache_type": type}


@pytest.mark.parametrize("type", ["balanced", "q8_0"])
def test_codes_of_accepted_tokens_are_those_of_plain_runs(path_of: PathOf, ops: Ops, type: str) -> None:
    """To the bit with compiled kernels. NumPy rounds products of several rows otherwise: hardly a code flips."""
    compared = 0
    with load_tiny(path_of(type), ops=ops, **settings(type)) as engine:
        for prompt in prompts(7)[:4]:
            drafting(engine, lambda ids: None)
            forget(engine)
            whole = [*prompt, *engine.generate(prompt, PARAMS, ANEW).token_ids]
            wanted = stored(engine, whole)
            forget(engine)
            drafts = Unpaced(Known(whole, 0.9, VOCABULARY, 3))
            drafting(engine, lambda ids, drafts=drafts: drafts)
            if engine.generate(prompt, PARAMS, ANEW).token_ids != tuple(whole[len(prompt) :]):
                assert ops.__class__ is NumpyOps  # then the stored tokens differ
                continue
            assert drafts.accepted > 20
            found = [array.view(np.uint8) for array in stored(engine, whole)]
            different = [one != other.view(np.uint8) for one, other in zip(found, wanted, strict=True)]
            size = sum(one.size for one in found)
            assert sum(map(np.sum, different)) <= (0.02 * size if ops.__class__ is NumpyOps else 0)
            compared += size
    assert compared > 1000
