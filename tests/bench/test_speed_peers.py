"""The engines to compare speed with: what they import, and how llama-cpp-python is asked."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest

from polarlm.bench.speed import peers
from polarlm.bench.speed.peers import NoPeer
from polarlm.bench.speed.peers.llama_cpp_python import Model


@pytest.mark.parametrize("peer", peers.every().values(), ids=lambda peer: peer.name)
def test_a_peer_imports_nothing_that_its_own_python_lacks(peer: peers.Peer) -> None:
    """Its Python has the package and the standard library alone."""
    foreign = "'numpy', 'polarlm.engine.'"
    program = f"import sys, {peer.module}; print([m for m in sys.modules if m.startswith(({foreign}))])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


# -- llama-cpp-python -----------------------------------------------------------------------------------------------


class Library(SimpleNamespace):
    """A stand-in for the package llama_cpp, which keeps the tokens of its cache and notes its calls."""

    def __init__(self) -> None:
        super().__init__(calls=[], settings=[], tokens=[], room=1 << 20, llama_token=IdArray())

    def __getattr__(self, name: str) -> Callable[..., SimpleNamespace]:
        """Functions whose results are only passed on."""
        return lambda *arguments: SimpleNamespace()

    def llama_model_load_from_file(self, path: bytes, settings: object) -> bool:
        return path.endswith(b".gguf")

    def llama_init_from_model(self, model: object, settings: SimpleNamespace) -> str:
        self.settings.append(settings)
        return "context"

    def llama_memory_seq_rm(self, memory: object, sequence: int, first: int, last: int) -> None:
        del self.tokens[first:]

    def llama_batch_get_one(self, ids: Sequence[int], count: int) -> list[int]:
        return list(ids)

    def llama_decode(self, context: str, batch: list[int]) -> int:
        self.calls.append((len(self.tokens), len(batch)))
        self.tokens += batch
        return int(len(self.tokens) > self.room)


class IdArray:
    """`llama_token * n`, which is called with n tokens."""

    def __mul__(self, count: int) -> object:
        return lambda *ids: list(ids)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setitem(sys.modules, "llama_cpp", made)
    return made


def test_the_peer_s_context_is_computed_once_and_all_runs_step_from_its_end(library: Library) -> None:
    other = Model("model.gguf", 4096, 2, "q4_0")
    (settings,) = library.settings
    assert (settings.n_ctx, settings.n_threads, settings.n_threads_batch) == (4096, 2, 2)
    assert (settings.type_k, settings.type_v) == (2, 2)
    for _ in range(2):
        assert other.generation_rate([3, 4, 5], [6, 7, 8]) > 0
    steps = [(3, 1), (4, 1), (5, 1)]
    assert library.calls == [(0, 3), *steps, *steps]
    other.generation_rate([3, 4, 5, 9], [6, 7])
    assert library.calls[7] == (3, 1), "a longer context goes on from the shorter one"
    other.generation_rate([3, 8], [6, 7])
    assert library.tokens == [3, 8], "another one from where they part"


def test_what_the_peer_cannot_do_is_named(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoPeer, match=r"^cannot load the model$"):
        Model("model.bin", 99, 1, "f16")
    other = Model("model.gguf", 99, 1, "f16")
    library.room = 10
    with pytest.raises(NoPeer, match=r"^cannot compute 11 tokens after 0$"):
        other.prompt_rate([5] * 11)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(NoPeer, match=r"^not installed \(pip install llama-cpp-python\)$"):
        Model("model.gguf", 99, 1, "f16")
