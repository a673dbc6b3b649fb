"""What the contestants of the speed measurement do: in processes of their own, and our engine."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.bench.speed.child import Child, Failed, OutOfTime, memory
from polarlm.bench.speed.contestants import Subject
from polarlm.bench.speed.ours import Ours
from polarlm.engine import EngineError, PromptOptions, SamplingParams
from polarlm.engine.model.forward import Transformer
from polarlm.engine.outputs import Chunk
from polarlm.model_loaders import load_weights
from tests.bare import bare_model, read_model
from tests.model_loaders.checkpoints import MODELS, as_gguf, read_all

ROOT = Path(__file__).resolve().parents[2]
MODULE = "tests.bench.contestant"
ASKED = """
import library, polarlm
from polarlm.bench.speed.child import serve

class Engine:
    def places(self):
        return [library.place, polarlm.__file__]

serve(Engine, [])
"""


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child(MODULE)
    yield child
    child.close()


def test_a_child_answers_and_reports_failures_and_goes_on(child: Child) -> None:
    with pytest.raises(Failed, match=r"^it needs a name$"):
        child.call("start", "")
    child.call("start", "Ada")
    assert child.call("greet", "Émile") == ["Ada", "Émile"]
    with pytest.raises(Failed, match=r"^ZeroDivisionError: division by zero$"):
        child.call("divide", 0)
    assert child.call("divide", 4) == 0.25


def test_a_call_ends_with_the_time_of_its_child() -> None:
    with closing(Child(MODULE, end=time.monotonic())) as child, pytest.raises(OutOfTime, match=r"^its time was over$"):
        child.call("wait")


@pytest.mark.skipif(os.name == "nt", reason="needs a symbolic link")
def test_only_our_own_package_comes_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside an installed package lie others, which may be for another Python than the child's."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
        (folder / "library.py").write_text(f"place = {folder.name!r}\n", encoding="utf-8")
    (ours / "polarlm").symlink_to(ROOT / "polarlm")
    (theirs / "polarlm.py").write_text("raise ImportError\n", encoding="utf-8")
    (theirs / "asked.py").write_text(ASKED, encoding="utf-8")
    monkeypatch.setattr("polarlm.bench.speed.child._ROOT", ours)
    monkeypatch.setenv("PYTHONPATH", str(theirs))
    with closing(Child("asked")) as child:
        child.call("start")
        assert child.call("places") == ["theirs", str(ours / "polarlm" / "__init__.py")]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signals")
def test_a_crash_is_named_with_the_last_line_that_was_written(child: Child) -> None:
    child.call("start", "Ada")
    for _ in range(2):  # further calls say the same
        with pytest.raises(Failed, match=r"^crashed \(SIGABRT\): GGML_ASSERT failed$"):
            child.call("crash")


def test_a_python_that_does_not_exist_is_a_failure() -> None:
    with pytest.raises(Failed, match=r"^/no/python cannot be started: No such file or directory$"):
        Child(MODULE, "/no/python")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the parts are counted on Linux only")
def test_memory_is_that_of_the_process(child: Child) -> None:
    child.call("start", "Ada")
    before = memory(child.pid)
    child.call("take", 40 << 20)
    after = memory(child.pid)
    assert after["private"] - before["private"] == pytest.approx(40 << 20, abs=1 << 20)
    assert after["peak"] > after["now"] - (1 << 20) >= after["private"] + after["file"] - (2 << 20)


# -- our engine -----------------------------------------------------------------------------------------------------


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
    steps = noted(monkeypatch, "step", lambda arguments: arguments[1].spans[0].start)  # first positions
    computed = noted(monkeypatch, "chunks", lambda arguments: len(arguments[1].ids))  # tokens of prefills
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


def test_of_experts_only_those_that_a_token_chooses_are_read(tmp_path: Path) -> None:
    """The peer's bytes are counted in a .gguf file, here in float32 as NumPy has them."""
    config, weights, _ = load_weights(MODELS / "qwen3_moe_normed")
    path = as_gguf(tmp_path / "model.gguf", "qwen3moe", config, read_all(weights))
    e, (mixer, ffn) = config.hidden_size, (config.layers[0].mixer, config.layers[0].ffn)
    of_layer = 2 * (mixer.heads + mixer.kv_heads) * mixer.head_dim * e + ffn.count * e + 3 * ffn.top_k * ffn.size * e
    expected = 4 * (config.vocab_size * e + len(config.layers) * of_layer)
    subject = Subject(path, "cpu", len(config.layers), mixer.kv_heads, mixer.head_dim)
    assert subject.peer_weight_bytes() == expected
    ours = object.__new__(Ours)  # the model has no tokenizer
    ours._model = bare_model(*read_model(MODELS / "qwen3_moe_normed"))
    assert ours.weight_bytes() == expected


def test_prompts_are_asked_together_and_what_the_store_has_is_not_computed_again(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps count from the first token of the last prompt to the first end of an answer."""
    steps = noted(monkeypatch, "step", lambda arguments: len(arguments[1].spans))  # sequences
    computed = noted(monkeypatch, "chunks", lambda arguments: len(arguments[1].ids))
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
