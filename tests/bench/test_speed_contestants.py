"""What the contestants of the speed measurement do: the engine, many streams, the peer, the memory's bandwidth."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polarlm.bench.speed.contestants import Subject
from polarlm.bench.speed.ours import Ours
from polarlm.bench.speed.peers import NoPeer
from polarlm.bench.speed.peers.llama_cpp_python import Model
from polarlm.engine import EngineError, PromptOptions, SamplingParams
from polarlm.engine.model.forward import Transformer
from polarlm.engine.outputs import Chunk
from polarlm.model_loaders import load_weights
from tests.bare import bare_model, read_model
from tests.model_loaders.checkpoints import MODELS, as_gguf, read_all

# -- ours ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def ours(tiny_path: Path) -> Ours:
    return Ours(str(tiny_path), 256, 1, {"device": "cpu", "cache_type": "f16"})


def noted(monkeypatch: pytest.MonkeyPatch, name: str, number: Callable[[tuple[Any, ...]], int]) -> list[int]:
    """A number of each call of a Transformer's method in this thread: in others, engines of earlier tests warm up."""
    numbers: list[int] = []
    method, here = getattr(Transformer, name), threading.get_ident()

    def call(*arguments: Any, **named: Any) -> Any:
        if threading.get_ident() == here:
            numbers.append(number(arguments))
        return method(*arguments, **named)

    monkeypatch.setattr(Transformer, name, call)
    return numbers


def ids(count: int) -> list[int]:
    return np.random.default_rng(0).integers(5, 96, count).tolist()


def test_a_context_is_computed_once_and_all_runs_step_from_its_end(ours: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    """An end token does not end a run, and the first token of the first run, which a prefill returns, is no step."""
    steps = noted(monkeypatch, "step", lambda arguments: arguments[1][0].start)  # first positions
    computed = noted(monkeypatch, "forward_units", lambda arguments: len(arguments[2]))  # tokens of prefills
    for _ in range(3):
        assert ours.generation_rate(ids(128), ids(41)) > 0
    assert computed == [129]
    assert steps == [*range(129, 169), *2 * [*range(128, 169)]]
    assert ours.generation_rate(ids(192), ids(6)) > 0
    assert computed[1:] == [65], "a longer context goes on from the shorter one"


def test_a_rate_is_of_the_time_between_tokens_as_a_program_sees_them(
    ours: Ours, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]

    def stream(ids: Sequence[int], params: SamplingParams, options: PromptOptions) -> Iterator[Chunk]:
        for seconds, tokens in ((5.0, (7,)), (1.0, ()), (2.0, (8,)), (1.0, (9,)), (50.0, ())):
            now[0] += seconds
            yield Chunk("", tokens[: params.max_tokens])
            if params.max_tokens == 1:
                return

    monkeypatch.setattr(ours._engine, "stream", stream)
    monkeypatch.setattr("polarlm.bench.speed.ours.time.perf_counter", lambda: now[0])
    assert ours.generation_rate(ids(8), ids(3)) == 2 / 4
    assert ours.prompt_rate(ids(10)) == 10 / 5
    with pytest.raises(EngineError, match=r"^stopped after 3 of 4 tokens$"):
        ours.generation_rate(ids(8), ids(4))


def test_bytes_are_those_of_all_matrices_that_a_step_reads(ours: Ours) -> None:
    weights = ours._model.weights
    matrices = [m for layer in weights.layers for m in layer.matrices.values()]
    parts = [part for linear in (*matrices, weights.head) for part in linear.parts]
    assert ours.weight_bytes() == sum(part.format.size(math.prod(part.shape)) for part in parts) > 0
    assert ours.cache_bytes(128) == ours._shape.sequence_bytes(128) > ours.cache_bytes(64) > 0


def test_of_experts_only_those_that_a_token_chooses_are_read(tmp_path: Path) -> None:
    """The peer's bytes are counted in a .gguf file, here in float32 as NumPy has them."""
    config, weights, _ = load_weights(MODELS / "qwen3_moe_normed")
    path = as_gguf(tmp_path / "model.gguf", "qwen3moe", config, read_all(weights))
    e, (mixer, ffn) = config.hidden_size, (config.layers[0].mixer, config.layers[0].ffn)
    of_layer = 2 * (mixer.heads + mixer.kv_heads) * mixer.head_dim * e + ffn.count * e + 3 * ffn.top_k * ffn.size * e
    expected = 4 * (config.vocab_size * e + len(config.layers) * of_layer)
    subject = Subject(path, "cpu", len(config.layers), mixer.kv_heads, mixer.head_dim, 0)
    assert subject.peer_weight_bytes() == expected
    ours = object.__new__(Ours)  # the model has no tokenizer
    ours._model = bare_model(*read_model(MODELS / "qwen3_moe_normed"))
    assert ours.weight_bytes() == expected


def test_prompts_are_asked_together_and_what_the_store_has_is_not_computed_again(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps count from the first token of the last prompt to the first end of an answer."""
    steps = noted(monkeypatch, "step", lambda arguments: len(arguments[1]))  # sequences
    computed = noted(monkeypatch, "forward_units", lambda arguments: len(arguments[2]))
    settings = {"device": "cpu", "cache_type": "f16", "parallel": 2, "kept_sequences": 2}
    ours, prompts, tokens = Ours(str(tiny_path), 4 * 128, 1, settings), [ids(65), ids(66)], 40
    for cached in (False, False, True):
        steps.clear()
        computed.clear()
        times = ours.together(prompts, tokens, cached)
        assert 0 < times["first"] < times["seconds"]
        assert sum(times["steps"]) < times["seconds"]
        assert len(times["steps"]) <= steps.count(2)
        assert sum(steps) == 2 * (tokens if cached else tokens - 1)
        assert sum(computed) == (0 if cached else 65 + 66)
    assert times["steps"], "prompts that are not computed leave time for steps of both"


# -- the peer ------------------------------------------------------------------------------------------------------


class Library(SimpleNamespace):
    """A stand-in for the package llama_cpp, which keeps the tokens of its cache and notes its calls."""

    __version__ = "0.0.1"
    LLAMA_FLASH_ATTN_TYPE_ENABLED = 1

    def __init__(self) -> None:
        super().__init__(calls=[], tokens=[], room=1 << 20, llama_token=IdArray())

    def __getattr__(self, name: str) -> Callable[..., SimpleNamespace]:
        """Functions whose results are only passed on."""
        return lambda *arguments: SimpleNamespace()

    def llama_model_load_from_file(self, path: bytes, settings: object) -> bool:
        self.calls.append(path.decode())
        return path.endswith(b".gguf")

    def llama_init_from_model(self, model: object, settings: SimpleNamespace) -> str:
        self.calls.append(vars(settings))
        return "context"

    def llama_memory_seq_rm(self, memory: object, sequence: int, first: int, last: int) -> None:
        assert (sequence, last) == (0, -1)
        del self.tokens[first:]

    def llama_batch_get_one(self, ids: Sequence[int], count: int) -> list[int]:
        assert len(ids) == count
        return list(ids)

    def llama_decode(self, context: str, batch: list[int]) -> int:
        self.calls.append((len(self.tokens), len(batch)))
        self.tokens += batch
        return int(len(self.tokens) > self.room)

    def llama_synchronize(self, context: str) -> None:
        self.calls.append("done")

    def llama_print_system_info(self) -> bytes:
        return b"CPU : AVX2 = 1 | "


class IdArray:
    """`llama_token * n`, which is called with n tokens."""

    def __mul__(self, count: int) -> object:
        return lambda *ids: list(ids)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setitem(sys.modules, "llama_cpp", made)
    return made


def test_the_peer_runs_the_file_with_the_given_threads_and_cache(library: Library) -> None:
    other = Model("a/model.gguf", 99, 2, "q4_0")
    assert other.about() == {"version": "0.0.1", "built_with": "CPU : AVX2 = 1"}
    path, settings = library.calls
    assert path == "a/model.gguf"
    threads, types = {"n_threads": 2, "n_threads_batch": 2}, {"type_k": 2, "type_v": 2}
    assert settings == {"n_ctx": 99, "n_batch": 2048, "flash_attn_type": 1, **threads, **types}


def test_the_peer_s_context_is_computed_once_and_all_runs_step_from_its_end(library: Library) -> None:
    other = Model("model.gguf", 4096, 1, "f16")
    library.calls.clear()
    for _ in range(2):
        assert other.generation_rate([3, 4, 5], [6, 7, 8]) > 0
    steps = [(3, 1), "done", (4, 1), "done", (5, 1), "done"]
    assert library.calls == [(0, 3), "done", *steps, *steps]
    library.calls.clear()
    other.generation_rate([3, 4, 5, 9], [6, 7])
    assert library.calls[:2] == [(3, 1), "done"], "a longer context goes on from the shorter one"
    other.generation_rate([3, 8], [6, 7])
    assert library.tokens == [3, 8], "another one from where they part"


def test_what_the_peer_cannot_do_is_named(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoPeer, match=r"^cannot load the model$"):
        Model("model.bin", 99, 1, "f16")
    other = Model("model.gguf", 99, 1, "f16")
    library.room = 10
    with pytest.raises(NoPeer, match=r"^cannot compute 11 tokens after 0$"):
        other.prompt_rate(ids(11))
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(NoPeer, match=r"^not installed \(pip install llama-cpp-python\)$"):
        Model("model.gguf", 99, 1, "f16")
