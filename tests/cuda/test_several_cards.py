"""Several GPUs in one process: each has some layers of a model, and the result is that of one GPU, to the bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import SamplingParams
from polarlm.engine.backends.cuda.cards import CardsOps
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.ops import Ops
from polarlm.engine.errors import EngineError
from polarlm.engine.loading import assembly
from polarlm.engine.loading.checks import settle
from polarlm.engine.sampling.sample import greedy
from tests.cuda.several_cards import Card, Traffic
from tests.cuda.test_model_emulated import N, Talk, model_of, talk
from tests.tiny import load_tiny, make_model

CODES, FULL = ("ring4", "ring3.5"), ("f16", "f16")


def cards(*counts: int, rooms: tuple[int, ...] = ()) -> CardsOps:
    """Cards of different sizes, two if there are no counts of layers."""
    rooms = rooms or tuple((4 - number) << 27 for number in range(len(counts) or 2))
    return CardsOps([CudaOps(Card(number, room)) for number, room in enumerate(rooms)], counts)


@pytest.mark.parametrize(
    ("fixture", "types", "counts"),
    [
        ("llama_gqa_llama3_tied", FULL, (1, 1)),
        ("qwen2_mixed_windows", CODES, (1, 2)),
        ("qwen2_mixed_windows", CODES, (2, 1)),
        ("qwen2_mixed_windows", ("f16", "f16"), (1, 1, 1)),
        ("qwen3_moe_normed", FULL, (1, 1)),
        ("gpt_oss_mxfp4", FULL, (1, 1)),
    ],
)
def test_logits_are_those_of_one_card(fixture: str, types: tuple[str, str], counts: tuple[int, ...]) -> None:
    wanted = talk(model_of(CudaOps(Card(0)), fixture, types))
    for one, found in zip(wanted, talk(model_of(cards(*counts), fixture, types)), strict=True):
        np.testing.assert_array_equal(found, one)


def test_a_step_moves_one_row_of_each_sequence_over_each_border() -> None:
    """Beside them each card gets the tables of the step in one upload for each input, and the host gets the ids."""
    fixture, ops = "qwen2_mixed_windows", cards(1, 1, 1)
    devices = [card._device for card in ops.cards]
    dialogue = Talk(model_of(ops, fixture, FULL), 3)
    for index in range(3):
        dialogue.prompt([5, 6, 7], outputs=1, index=index)
    dialogue.step([8, 9, 10])  # what kernels keep is uploaded
    width = 4 * dialogue.model.config.hidden_size
    for device in devices:
        device.traffic = Traffic()
    model, store = dialogue.model, dialogue.model.store
    spans = [store.open_step(sequence) for sequence in dialogue.sequences]
    model.step(spans, [8, 9, 10], [greedy(model.config.vocab_size)] * 3)
    store.commit_steps(spans)
    moved = [device.traffic for device in devices]
    assert [one.received for one in moved] == [[], [3 * width], [3 * width]]
    assert [one.downloads for one in moved] == [[], [], [3 * 4]]
    tables = 2 * 1 + len(store.groups)  # cosines, sines, spans
    assert [len(one.uploads) for one in moved] == [1 + tables, tables, 2 + tables]


PROMPT = [5 + 7 * i % 90 for i in range(3 * N + 5)]


def answers(ops: Ops, path: Path, **settings: Any) -> list[Any]:
    """Ids and log-probabilities of an engine's answers to a prompt, and to one that begins like it."""
    settings = {"block_size": N, "ctx_size": 128, "calibration": False, "parallel": 2} | settings
    params = SamplingParams(max_tokens=N + 3, temperature=0, ignore_eos=True, logprobs=3)
    with load_tiny(path, ops=ops, **settings) as engine:
        found = [engine.generate(prompt, params) for prompt in (PROMPT, [*PROMPT[: 2 * N + 3], 9, 8])]
        assert found[1].usage.cached_tokens >= 2 * N
        return [one.logprobs for one in found]


@pytest.mark.parametrize("types", ["balanced", "f16"])
def test_an_engine_answers_as_on_one_card(tmp_path: Path, types: str) -> None:
    path = make_model(tmp_path, "llama_gqa_llama3_tied")
    wanted = answers(CudaOps(Card(0)), path, cache_type=types)
    assert answers(cards(), path, cache_type=types, tensor_split="1,1") == wanted


@pytest.mark.parametrize(("asked", "counts"), [("3,1", [2, 1]), ("1,2", [1, 2]), ("auto", [1, 2]), (None, [1, 2])])
def test_layers_are_shared_as_asked(tmp_path: Path, asked: str | None, counts: list[int]) -> None:
    path, said = make_model(tmp_path, "qwen2_mixed_windows"), []
    config = settle(path, None, {"block_size": N, "ctx_size": 128, "cache_type": "f16", "tensor_split": asked})
    parts = assembly.assemble(config, said.append, ops=cards(rooms=(1 << 27, 1 << 28)))
    assert [len(share.layers) for share in parts.split.shares] == counts
    first, second = ("layer 0", "layers 1 to 2") if counts[0] == 1 else ("layers 0 to 1", "layer 2")
    assert f"Several GPUs: {first} on emulated GPU (cuda:0), {second} on emulated GPU (cuda:1)." in said
    assert "on the emulated GPU (cuda:0) and emulated GPU (cuda:1);" in assembly.fit_line(parts)
    for share in parts.split.shares:  # what was planned is what is there
        free, total = share.card._device.memory()
        planned = share.weights + parts.plan.bytes_of(share.layers)
        assert planned <= total - free <= planned + 2048
    parts.close()


SMALL = 240 << 10  # bytes of a card: too few for the whole of `llama_gqa_llama3_tied`


def loaded(tmp_path: Path, ops: Ops, said: list[str], **settings: Any) -> assembly.Parts:
    settings = {"block_size": N, "ctx_size": 64, "calibration": False, "parallel": 1, "kept_sequences": 1} | settings
    config = settle(make_model(tmp_path, "llama_gqa_llama3_tied"), None, settings)
    return assembly.assemble(config, said.append, ops=ops)


def test_other_gpus_help_where_one_is_too_small(tmp_path: Path) -> None:
    said: list[str] = []
    for room, several in ((1 << 28, False), (SMALL, True)):
        ops = CudaOps(Card(0, room))
        ops.others = lambda: [CudaOps(Card(1))]
        parts = loaded(tmp_path, ops, said)
        assert (parts.split is not None) == several
        assert any("Several GPUs" in one for one in said) == several
        parts.close()
        for file in tmp_path.iterdir():
            file.unlink()


@pytest.mark.parametrize(
    ("rooms", "settings", "says"),
    [
        ((SMALL, SMALL), {"ctx_size": 60_000}, "warning: of the 60,000 tokens of context"),
        ((1 << 12, 1 << 28), {"tensor_split": "1,1"}, r"take .* on emulated GPU \(cuda:0\), but only"),
        ((1 << 28, 1 << 12), {"tensor_split": "1,1"}, r"take .* on emulated GPU \(cuda:1\), but only"),
        ((1 << 28, 1 << 28), {"tensor_split": "1,2,3"}, "tensor_split=1,2,3: there are 3 shares for 2 GPUs "),
        ((1 << 28, 1 << 28), {"tensor_split": "1,x"}, "tensor_split=1,x: give a number above 0 for each GPU"),
        ((1 << 28, 1 << 28), {"tensor_split": "9,1"}, "GPU number 1 would get none of the 2 layers"),
        ((1 << 28,) * 3, {}, "the model has 2 layers for 3 GPUs"),
    ],
)
def test_what_does_not_fit_is_a_sentence(
    tmp_path: Path, rooms: tuple[int, ...], settings: dict[str, Any], says: str
) -> None:
    said: list[str] = []
    try:
        loaded(tmp_path, cards(rooms=rooms), said, **settings).close()
    except EngineError as error:
        said = [str(error)]
    assert any(re.search(says, one) for one in said), said
