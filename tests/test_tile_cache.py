"""Packed weights are written once, and mapped at later starts."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from polarlm.engine import Engine, EngineError, SamplingParams
from polarlm.engine.backends.native.ops import NativeOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import KeptTiles
from polarlm.engine.loading import assembly, tile_cache
from polarlm.engine.loading.checks import settle
from polarlm.engine.loading.tile_cache import TileCache
from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from tests.little_memory import answer_in
from tests.small_disk import small_disk
from tests.tiny import make_model, matrices_read

SETTINGS: dict[str, Any] = {"block_size": 16, "ctx_size": 64, "calibration": False}
CACHED = {**SETTINGS, "tile_cache": "1M"}
SOME = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the files, which does not exist yet."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "tiles"


def answer(path: Path, said: list[str] | None = None, **settings: Any) -> list[int]:
    """The answer of an engine that is loaded with compiled kernels. said: gets its sentences."""
    options = {**CACHED, **settings}
    parts = assembly.assemble(settle(path, None, options), None if said is None else said.append, ops=NativeOps(1))
    with Engine(parts) as engine:
        if said is not None:
            said.append(engine.fit_line())
        return list(engine.generate([5, 6, 7, 8], SOME).token_ids)


def test_a_second_start_reads_and_packs_no_matrix(
    tiny_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer(tiny_path, tile_cache=None)
    assert not folder.exists()
    read, said = matrices_read(monkeypatch), list[str]()
    assert answer(tiny_path, said) == expected
    assert len(read) == len(set(read)) > 0
    assert "mapped from the tile cache" in said[-1]
    read.clear()
    assert answer(tiny_path) == expected
    assert not read


def test_a_file_is_of_one_weight_type_and_of_one_state_of_the_weights(tmp_path: Path, folder: Path) -> None:
    model = make_model(tmp_path)
    answer(model)
    assert answer(model, weight_type="q8_0") == answer(model, weight_type="q8_0", tile_cache=None)
    assert len(list(folder.iterdir())) == 2

    (weights,) = model.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-64:] = bytes(64)  # somewhere in one matrix
    weights.write_bytes(content)
    assert answer(model) == answer(model, tile_cache=None)
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[:99] + bytes([content[99] ^ 1]) + content[100:],
        lambda content: b"",
        lambda content: content[:9999] + bytes([content[9999] ^ 1]) + content[10000:],
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    ],
    ids=["shorter", "another header", "empty", "another tile", "another checksum"],
)
def test_a_damaged_file_is_replaced(tiny_path: Path, folder: Path, damage: Callable[[bytes], bytes]) -> None:
    expected = answer(tiny_path)
    (file,) = folder.iterdir()
    content = file.read_bytes()
    file.write_bytes(damage(content))
    assert answer(tiny_path) == expected
    assert file.read_bytes() == content


@pytest.mark.parametrize("while_loading", [True, False])
def test_damage_that_no_start_has_noticed_is_not_the_model_s(
    tiny_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, while_loading: bool
) -> None:
    """An output that is not finite has all tiles checked: of fitting the cache, or of a request."""
    monkeypatch.setattr(tile_cache, "_CHECKED_PIECES", 0)
    settings = {"calibration": True} if while_loading else {}
    expected = answer(tiny_path, **settings)
    (file,) = folder.iterdir()
    content, said = file.read_bytes(), list[str]()
    file.write_bytes(content[:4000] + b"\xff" * 20_000 + content[24_000:])
    for kept in folder.parent.glob("calibration-*"):
        kept.unlink()
    if not while_loading:
        with pytest.raises(
            EngineError, match=f"the file {file.name} are damaged, and it is removed: load the model again"
        ):
            answer(tiny_path)
        assert not file.exists()
    assert answer(tiny_path, said, **settings) == expected
    assert any("it is removed: weights are packed again" in sentence for sentence in said) == while_loading
    assert file.read_bytes() == content


@pytest.mark.parametrize("is_known", [True, False])
def test_a_model_is_loaded_all_the_same_on_a_full_disk(
    tiny_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """is_known: whether it is full before anything is written."""
    if not is_known:
        monkeypatch.setattr(tile_cache.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 40))
    folder.mkdir(parents=True)
    expected, said = answer(tiny_path, tile_cache=None), list[str]()
    with small_disk(folder, 16 << 10):
        assert answer(tiny_path, said) == expected
        assert not list(folder.iterdir())
    reason = "of the disk are free" if is_known else "No space left on device"
    assert any(reason in sentence and str(folder) in sentence for sentence in said)
    assert "mapped" not in said[-1]


def test_a_limit_that_is_too_small_is_named_and_costs_no_other_file(tiny_path: Path, folder: Path) -> None:
    answer(tiny_path)
    before, said = list(folder.iterdir()), list[str]()
    answer(tiny_path, said, weight_type="q8_0", tile_cache="1K")
    assert any("more than tile_cache allows" in sentence for sentence in said)
    assert list(folder.iterdir()) == before


def test_a_backend_without_tiles_says_so(tiny_path: Path, folder: Path) -> None:
    said: list[str] = []
    parts = assembly.assemble(settle(tiny_path, None, CACHED), said.append, ops=NumpyOps())
    parts.close()
    assert any("tile_cache has no effect with numpy" in sentence for sentence in said)
    assert not folder.exists()


# -- files of a few bytes ----------------------------------------------------------------------------------------------


def loader(matrices: Sequence[bytes]) -> Callable[[KeptTiles], Any]:
    """A function that loads `matrices`, and returns what it got."""

    def parts(matrix: bytes) -> Iterator[np.ndarray]:
        for first in range(0, len(matrix), 70):
            yield np.frombuffer(matrix[first : first + 70], np.uint8)

    def load(kept: KeptTiles) -> list[np.ndarray | None]:
        return [kept.take(len(matrix), lambda matrix=matrix: parts(matrix)) for matrix in matrices]

    return load


def loaded(cache: TileCache, matrices: Sequence[bytes]) -> list[bytes | None]:
    """The bytes of `matrices` when they are loaded with this cache."""
    load = loader(matrices)
    tiles = cache.tiles(load)
    assert tiles is not None
    return [None if one is None else one.tobytes() for one in load(tiles)]


def cache(folder: Path, number: int, limit: int = 1 << 20) -> TileCache:
    return TileCache(folder / name(number), limit, print)


def name(number: int) -> str:
    return f"{number:032x}"


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_the_files_used_least_recently_are_removed(folder: Path) -> None:
    matrix = [b"x" * 10_000]
    for number in (1, 2, 3):
        loaded(cache(folder, number, 35_000), matrix)
        os.utime(folder / name(number), (number, number))
    loaded(cache(folder, 1, 35_000), matrix)  # is used
    (folder / "notes.txt").write_text("of the user")
    loaded(cache(folder, 4, 35_000), matrix)
    assert names(folder) == [*map(name, (1, 3, 4)), "notes.txt"]
    loaded(cache(folder, 3, 25_000), matrix)  # a lower limit
    assert names(folder) == [*map(name, (3, 4)), "notes.txt"]
    os.utime(folder / name(4), (time.time() + 86_400,) * 2)  # before the clock was set back
    loaded(cache(folder, 5, 25_000), matrix)
    assert names(folder) == [*map(name, (3, 5)), "notes.txt"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows itself keeps files that are mapped")
def test_files_that_are_mapped_stay(folder: Path) -> None:
    """As a model's stay when its draft model is loaded."""
    load = loader([b"x" * 10_000])
    weights = load(cache(folder, 1, 15_000).tiles(load))
    assert cache(folder, 2, 15_000).tiles(load) is None
    assert names(folder) == [name(1)]
    del weights
    assert cache(folder, 2, 15_000).tiles(load) is not None
    assert names(folder) == [name(2)]


def test_processes_may_write_the_same_file_at_once(folder: Path) -> None:
    matrices, results = [bytes([number]) * 5000 for number in range(20)], list[Any]()
    together = threading.Barrier(4)

    def run() -> None:
        together.wait()
        results.append(loaded(cache(folder, 1), matrices))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [matrices] * 4
    assert names(folder) == [name(1)]


# -- models that are larger than memory --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's private memory")
def test_a_model_may_be_larger_than_memory(demo_path: Path) -> None:
    """For 137 MiB of weights, 88 MiB of private memory are left, when the file is written and when it is mapped.

    Slow: processes load the demonstration model six times."""
    settings = {"weight_type": "q8_0"}
    assert "not enough memory" in answer_in(88, demo_path, settings)
    first = answer_in(88, demo_path, settings, tile_cache="1G")
    assert first.startswith("(")
    assert answer_in(88, demo_path, settings, tile_cache="1G") == first
