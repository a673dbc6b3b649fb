"""A state that is not K/V goes through all that the store, the prefix cache, requests and sessions do with a state.

The first layer of the model sums its inputs, which are embeddings, so the state of any tokens is known exactly.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from polarlm.engine import Engine, SamplingParams
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.model.layers.kinds import MIXERS
from polarlm.model_loaders import families
from tests.state.running_sum import RunningSum, SumMixer, Sums
from tests.tiny import PLAIN, assert_idle, load_tiny, make_model

FAMILY = """
from dataclasses import replace

from polarlm.model_loaders.families import llama
from polarlm.model_loaders.files.tensor_table import TensorTable
from tests.state.running_sum import RunningSum

ARCHITECTURES = ("SumForCausalLM",)


def configure(fields):
    config = replace(llama.configure(fields), family="sums")
    first, *others = config.layers
    return replace(config, layers=(replace(first, mixer=RunningSum(config.hidden_size)), *others))


def tensors(config):
    first, *others = config.layers
    table = llama.tensors(replace(config, layers=(others[0], *others)))
    slots = {name: specs for name, specs in table.layers[0].items() if name in ("ffn_norm", "gate_up", "down")}
    return TensorTable(table.top, (slots, *table.layers[1:]))
"""
GREEDY = {"temperature": 0.0, "ignore_eos": True}
N = PLAIN["block_size"]
Load = Callable[..., Engine]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Loads engines of a model whose first layer is a RunningSum, and closes them."""
    (tmp_path / "families").mkdir()
    (tmp_path / "families" / "sums.py").write_text(FAMILY, encoding="utf-8")
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path / "families")])
    monkeypatch.setitem(MIXERS, RunningSum, SumMixer)
    (tmp_path / "model").mkdir()
    folder = make_model(tmp_path / "model")
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(written | {"model_type": "sums", "architectures": ["SumForCausalLM"]})
    )
    file = folder / "model.safetensors"
    given = load_file(file)
    absent = ("model.layers.0.self_attn.", "model.layers.0.input_layernorm")
    save_file({name: tensor for name, tensor in given.items() if not name.startswith(absent)}, file)
    engines = []

    def load(**settings: object) -> Engine:
        engines.append(load_tiny(folder, ops=NumpyOps(1), **{**PLAIN, "ctx_size": 256, **settings}))
        return engines[-1]

    yield load
    for engine in engines:
        if not engine._closed:
            assert_idle(engine)
            engine.close()
    sys.modules.pop("polarlm.model_loaders.families.sums", None)
    vars(families).pop("sums", None)


def ids_of(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(5, 90, count).tolist()


def check(engine: Engine, ids: Sequence[int]) -> int:
    """Assert that the state of the longest stored prefix of `ids` is the sum of its embeddings → its tokens."""
    with engine._exclusive():
        kv = engine._prefixes.match_prefix(ids)
        (group,) = (group for group in engine._store.groups if isinstance(group, Sums))
        table = kv.tables[engine._store.groups.index(group)]
        model = engine._model
        embedded = model.ops.embed(model.weights.embedding, np.asarray(ids[: kv.length], np.int32), 1.0)
        found = group.at(0, table, kv.length).copy()
        length = kv.length
        engine._prefixes.release(kv, ids)
    np.testing.assert_array_equal(found, embedded.astype(np.float64).sum(axis=0))
    return length


def answer(engine: Engine, ids: Sequence[int], tokens: int = 12, **more: object) -> list[int]:
    return list(engine.generate(list(ids), SamplingParams(max_tokens=tokens, **GREEDY, **more)).token_ids)


def test_prompts_and_steps_leave_the_state_of_their_tokens(load: Load) -> None:
    engine = load()
    for length in (1, N - 1, N, N + 1, 2 * N, 5 * N + 3):
        ids = ids_of(length, seed=length)
        ids += answer(engine, ids)
        assert check(engine, ids) == len(ids) - 1  # the last token was never computed


def test_a_prompt_in_chunks_has_the_same_state(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NumpyOps, "prefill_rows", 5)
    engine, ids = load(), ids_of(4 * N + 5)
    answer(engine, ids, tokens=1)
    assert check(engine, ids) == len(ids)
    assert check(engine, ids[: 4 * N]) == 4 * N


def test_a_longer_prompt_begins_where_a_sequence_ended(load: Load) -> None:
    engine, ids = load(), ids_of(3 * N + 2)
    ids += answer(engine, ids)
    longer = [*ids[:-1], *ids_of(2 * N, seed=1)]
    found = engine.generate(longer, SamplingParams(max_tokens=4, **GREEDY))
    assert found.usage.cached_tokens == len(ids) - 1
    assert check(engine, [*longer, *found.token_ids]) == len(longer) + 3


def test_a_prompt_that_differs_begins_at_the_end_of_a_block(load: Load) -> None:
    """The sum of a part of a block is not known, though its K/V are."""
    engine, ids = load(), ids_of(3 * N)
    answer(engine, ids, tokens=1)
    other = [*ids, *ids_of(N // 2, seed=1)]
    answer(engine, other, tokens=1)
    branch = [*other[: 3 * N + 2], *ids_of(N, seed=2)]
    found = engine.generate(branch, SamplingParams(max_tokens=2, **GREEDY))
    assert found.usage.cached_tokens == 3 * N
    assert check(engine, [*branch, *found.token_ids]) == len(branch) + 1


def test_an_aborted_span_changes_nothing(load: Load) -> None:
    engine, ids = load(), ids_of(2 * N + 3)
    with engine._exclusive():
        model, store = engine._model, engine._store
        kv = store.new_sequence()
        span = store.open(kv, len(ids))
        model.forward([span], ids)
        store.commit(span)
        (group,) = (group for group in store.groups if isinstance(group, Sums))
        table = kv.tables[store.groups.index(group)]
        before = group.at(0, table, kv.length).copy()
        for count, is_step in ((N, False), (2, False), (3, True)):
            span = store.open_step(kv, count) if is_step else store.open(kv, count)
            model.forward([span], ids_of(count, seed=3))
            store.abort(span)
            np.testing.assert_array_equal(group.at(0, table, kv.length), before)
        store.release(kv)


def test_a_session_goes_on_in_another_engine(load: Load, tmp_path: Path) -> None:
    engine, ids = load(), ids_of(4 * N + 5)
    ids += answer(engine, ids)
    saved = engine.save_session(tmp_path / "session")
    assert saved == len(ids) - 1
    other = load()
    other.load_session(tmp_path / "session")
    assert check(other, ids) == saved
    longer = [*ids, *ids_of(5, seed=1)]
    found = other.generate(longer, SamplingParams(max_tokens=8, **GREEDY))
    assert found.usage.cached_tokens == saved
    assert list(found.token_ids) == answer(engine, longer, tokens=8)
    assert check(other, [*longer, *found.token_ids]) == len(longer) + 7


@pytest.mark.parametrize("more", [0, 3])
def test_another_process_takes_it_from_a_disk(load: Load, tmp_path: Path, more: int) -> None:
    """Where a sequence ended, and at the end of its last block; a part of the tokens behind it is of no use."""
    engine, ids = load(cache_disk="10M", cache_disk_folder=str(tmp_path / "disk")), ids_of(4 * N)
    ids += answer(engine, ids, tokens=6)
    engine.close()
    other = load(cache_disk="10M", cache_disk_folder=str(tmp_path / "disk"))
    cut = 2 if more else 0  # of the tokens behind the last block
    prompt = [*ids[: len(ids) - 1 - cut], *ids_of(1 + more, seed=1)]
    found = other.generate(prompt, SamplingParams(max_tokens=2, **GREEDY))
    assert found.usage.cached_tokens == (4 * N if cut else 4 * N + 5)
    assert "store" not in found.usage.cached_from
    assert check(other, [*prompt, *found.token_ids]) == len(prompt) + 1
