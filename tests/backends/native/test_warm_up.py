"""The kernels of a conversation are known, and compiled, before its first request."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Engine, EngineError, PromptOptions, SamplingParams, codecs
from polarlm.engine.backends.kv import CacheFormat, FilledBlocks, KVLocation, Move
from polarlm.engine.backends.native import launch as launch_module
from polarlm.engine.backends.native.kernels.linear.tiling import largest_tiling
from polarlm.engine.backends.native.ops import NativeOps
from polarlm.engine.jit.compile import library as library_module
from polarlm.engine.jit.compile.compiler import compile_object
from polarlm.engine.jit.compile.library import Library
from polarlm.engine.jit.compile.object_cache import object_cache
from polarlm.engine.jit.compile.target import best
from polarlm.engine.jit.lang import Kernel
from polarlm.engine.loading import warm_up
from polarlm.engine.model.weights import FileMatrix
from polarlm.engine.requests.drafts import StepSeconds
from tests.compiled import end_of_compilation
from tests.pairs import mostly_slow
from tests.tiny import VOCABULARY, by_count, load_tiny, make_model, matrices_read

PROMPT = np.random.default_rng(0).integers(5, VOCABULARY, 72).tolist()
SETTINGS: dict[str, Any] = {"block_size": 16, "ctx_size": 256, "calibration": False}
SOME = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


object_code = functools.cache(compile_object)


class Watch:
    """The kernels that engines loaded from now on have announced, and those that they have needed, in order.

    Their library is a new one, as in a new process: engines of earlier tests may still warm up, in threads.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.announced: list[str] = []
        self.needed: list[str] = []
        expect, address = Library.expect, Library.address
        self.library = Library(best(), object_cache(best(), launch_module._SOURCES))

        def watched_expect(library: Library, kernels: Any, **more: bool) -> None:
            if library is self.library:
                self.announced += [kernel.name for kernel in kernels]
            expect(library, kernels, **more)

        def watched_address(library: Library, kernel: Kernel) -> int:
            if library is self.library:
                self.needed.append(kernel.name)
            return address(library, kernel)

        monkeypatch.setattr(launch_module, "library", lambda level, sources: self.library)
        monkeypatch.setattr(Library, "expect", watched_expect)
        monkeypatch.setattr(Library, "address", watched_address)


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], bool]], None]:
    """Gives the kernels of engines that are loaded from now on to a new library, which compiles names that pass."""
    end_of_compilation()  # of kernels for other libraries

    def only(passes: Callable[[str], bool]) -> None:
        def planted(kernel: Kernel, level: Any) -> bytes:
            if not passes(kernel.name):
                raise RuntimeError("LLVM ERROR: no registers")
            return object_code(kernel, level)

        fresh = Library(best(), None)
        monkeypatch.setattr(launch_module, "library", lambda level, sources: fresh)
        monkeypatch.setattr(library_module, "compile_object", planted)

    return only


def converse(path: Path, monkeypatch: pytest.MonkeyPatch, count: int = 20, **settings: Any) -> tuple[list[str], int]:
    """Two turns of a conversation: a prompt of several blocks, an answer that completes blocks, and a second prompt
    that reads them, also from the middle of a block. All kernels that they need have been announced; return their
    names, and the number of drafted tokens."""
    watch = Watch(monkeypatch)
    with load_tiny(path, ops=NativeOps(1), **{**SETTINGS, **settings}) as engine:
        watch.needed.clear()
        answer = engine.generate(PROMPT, replace(SOME, max_tokens=count))
        assert len(answer.token_ids) == count
        engine.generate([*PROMPT, *answer.token_ids, *PROMPT], SOME)
        assert engine.generate([*PROMPT[:66], *PROMPT], SOME).usage.cached_tokens >= 64
    assert watch.needed
    assert set(watch.needed) <= set(watch.announced)
    return watch.needed, answer.usage.drafted_tokens


PLAIN = "llama_gqa_linear"
CONVERSATIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("qwen3_next_shared_keys", "lfm2_tied", "kimi_linear_nope")),  # with snapshots
    *((PLAIN, {"cache_type": name}) for name in ("f16", "polarpair-m4n4/f16", "polarquant")),
    (PLAIN, {"cache_type": "turbo4", "weight_type": "q8_0"}),
    (PLAIN, {"cache_type": "polarpair-m4n4+minmax/f16"}),
]


@pytest.mark.usefixtures("warmed_up_at_once")
@mostly_slow("name, settings", CONVERSATIONS, CONVERSATIONS[:3], ids=str)
def test_a_conversation_needs_no_other_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, settings: dict[str, Any]
) -> None:
    converse(make_model(tmp_path, name), monkeypatch, **settings)


@pytest.mark.usefixtures("warmed_up_at_once")
def test_a_draft_model_needs_no_other_kernels(tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It drafts over the ends of blocks, and has recurrent layers, which the model lacks."""
    path = make_model(tmp_path, "granite_hybrid_tied")
    monkeypatch.setattr(StepSeconds, "__call__", lambda *counts: 1.0)  # drafts pay, however busy the machine is
    needed, drafted = converse(tiny_path, monkeypatch, 60, cache_type="f16", model_draft=str(path))
    assert drafted
    assert any(name.startswith(("gated_delta", "mamba2")) for name in needed)


@pytest.mark.usefixtures("warmed_up_at_once")
@pytest.mark.parametrize("name", ["llama_gqa_linear", "qwen3_5_tied"])
def test_requests_at_once_need_no_other_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """An engine that has been idle after loading asks for none, nor do others serve in their place."""
    watch = Watch(monkeypatch)
    settings = {**SETTINGS, "cache_type": "f16", "parallel": 3}
    with load_tiny(make_model(tmp_path, name), ops=NativeOps(1), **settings) as engine:
        watch.library.wait([*watch.library._futures])
        watch.needed.clear()
        announced = [*watch.announced]
        for number in range(3):
            engine.submit([5 + number, *PROMPT[:20]], SOME, into=[])
        while engine.work():
            pass
    assert watch.needed
    assert set(watch.needed) <= set(announced)
    assert watch.announced == announced


def test_later_turns_are_warmed_up_a_moment_after_loading(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the engine is closed before: then no compiler is needed where the first kernels are in the cache."""
    watch = Watch(monkeypatch)
    for seconds in (0.0, 3600.0):
        monkeypatch.setattr(warm_up, "_SECONDS", seconds)
        watch.announced.clear()
        with load_tiny(tiny_path, ops=NativeOps(1), **{**SETTINGS, "cache_type": "ring4"}) as engine:
            timer = engine._parts.warm_up_timer
            assert timer is not None
            if not seconds:
                timer.join()
        timer.join()  # ended by closing the engine
        assert any(name.startswith("decode_") for name in watch.announced) == (not seconds)


def test_weights_are_read_once(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = matrices_read(monkeypatch)
    with load_tiny(tiny_path, ops=NativeOps(1), **SETTINGS):
        assert read
        assert len(read) == len(set(read))


def test_kernels_are_compiled_while_weights_are_read(
    tiny_path: Path, compiles: Callable[[Callable[[str], bool]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_read, slabs = threading.Event(), FileMatrix.slabs
    monkeypatch.setattr(FileMatrix, "slabs", lambda matrix, nbytes: is_read.set() or slabs(matrix, nbytes))
    compiles(lambda name: is_read.wait(120))
    with Engine.load(tiny_path, device="cpu", **SETTINGS) as engine:
        assert engine.status().backend == "native"  # the wait for the event has not run out


def test_an_engine_is_loaded_when_the_kernels_of_a_first_answer_are_compiled(
    tiny_path: Path, compiles: Callable[[Callable[[str], bool]], None]
) -> None:
    """Those that read codes in a prompt come later: a first answer needs none of them."""
    is_loaded = threading.Event()
    compiles(lambda name: not name.startswith("decode_") or is_loaded.wait(120))
    with Engine.load(tiny_path, device="cpu", **{**SETTINGS, "cache_type": "ring4"}) as engine:
        assert engine.generate(PROMPT[:40], SOME).finish_reason == "length"
        is_loaded.set()
        assert engine.generate([*PROMPT[:40], *PROMPT], SOME).usage.cached_tokens


def test_a_bar_shows_the_kernels_that_are_waited_for(
    tiny_path: Path, compiles: Callable[[Callable[[str], bool]], None], bars: list[Any]
) -> None:
    compiles(lambda name: True)
    with Engine.load(tiny_path, device="cpu", verbose=print, **SETTINGS):
        loading, compiling = bars
    assert loading.desc.startswith("Loading")
    assert compiling.desc.startswith("Compiling kernels for this CPU (once)")
    assert compiling.n == compiling.total > 5
    assert compiling.settings["delay"] < 1


@pytest.mark.parametrize("kind", ["product_f16_1_", "prompt_attention", "encode_"])
def test_a_kernel_that_cannot_be_compiled_leaves_all_to_numpy(
    tiny_path: Path, compiles: Callable[[Callable[[str], bool]], None], kind: str
) -> None:
    compiles(lambda name: not name.startswith(kind))
    said: list[str] = []
    settings = {**SETTINGS, "cache_type": "ring4"}
    with Engine.load(tiny_path, device="cpu", verbose=said.append, **settings) as engine:
        assert engine.generate(PROMPT, SOME).finish_reason == "length"
        threads = engine.status().threads
    sentences = [sentence for sentence in said if "cannot be compiled" in sentence]
    assert len(sentences) == 1
    assert kind in sentences[0]
    assert "NumPy computes in place of compiled kernels" in sentences[0]
    assert "kernels" not in threads.why


def test_a_kernel_of_later_turns_that_cannot_be_compiled_is_an_error_of_these(
    tiny_path: Path, compiles: Callable[[Callable[[str], bool]], None]
) -> None:
    compiles(lambda name: not name.startswith("decode_"))
    with Engine.load(tiny_path, device="cpu", **{**SETTINGS, "cache_type": "ring4"}) as engine:
        for _ in range(2):
            assert engine.generate(PROMPT[:40], SOME, PromptOptions(cache_prompt=False)).finish_reason == "length"
            with pytest.raises(EngineError, match=r"decode_.* cannot be compiled .*POLARLM_CPU_LEVEL"):
                engine.generate([*PROMPT[:40], *PROMPT], SOME)


def test_a_batch_goes_row_by_row_where_its_kernels_cannot_be_compiled(
    tiny_path: Path, compiles: Callable[[Callable[[str], bool]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No first request needs the kernels of steps of two rows: the answers are the same without them."""
    if largest_tiling(best()).rows == 2:
        pytest.skip("at this level prompts, too, take two rows at a time")
    answers = []
    for passes in (lambda name: True, lambda name: "_f16_2" not in name):
        compiles(passes)
        with Engine.load(tiny_path, device="cpu", **SETTINGS) as engine:
            by_count(engine, monkeypatch)
            streams = [engine.stream(PROMPT[number:], SOME) for number in range(2)]
            chunks = [[next(stream) for stream in streams], *zip(*streams, strict=True)]
            answers.append([token for pair in chunks for chunk in pair for token in chunk.token_ids])
            threads = engine.status().threads
    assert answers[0] == answers[1]
    assert "; without product_f16_2" in threads.why
    assert threads.why.endswith(", which cannot be compiled")


def test_a_warm_up_writes_to_no_slot() -> None:
    """Zeros that are not written take no memory; copies of them would."""
    ops = NativeOps(1)
    f16 = codecs.get("f16")
    format = CacheFormat(f16, f16, None, None, mean_bits=0, block_size=4, kv_heads=2, head_dim=8)
    cache = ops.cache(format, 2, 2)
    source = np.ones((2, 4, 8), np.float32), np.ones((2, 4, 8), np.float32)
    ops.warm_up().ops.copy_full([cache], [Move(KVLocation(None, 1), KVLocation(source, 0), 4)])
    assert not cache.full_k.any()
    ops.copy_full([cache], [Move(KVLocation(None, 1), KVLocation(source, 0), 4)])
    assert cache.full_k[1].all()


def test_a_warm_up_encodes_no_block() -> None:
    """What it would read was not computed. The launches that it prepares run later."""
    ops = NativeOps(1)
    f16 = codecs.get("f16")
    format = CacheFormat(f16, f16, None, None, mean_bits=0, block_size=16, kv_heads=2, head_dim=16)
    cache = ops.cache(format, 2, 2)
    cache.full_k[0], cache.full_k[1], cache.full_v[1] = np.nan, 1, 2
    blocks = [FilledBlocks([cache], [1], [KVLocation(None, slot)]) for slot in range(2)]
    ops.warm_up().ops.encode_blocks(blocks[:1])
    assert not cache.k["tiles"].any()
    ops.encode_blocks(blocks[1:])
    for decoded, expected in zip(ops.decode_to_float(cache, np.array([1])), (1, 2), strict=True):
        np.testing.assert_array_equal(decoded, np.full((2, 16, 16), expected, np.float32))
