"""Layers of a prompt that are sealed together have the codes and the logits of layers that are sealed one by one."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.kv import layers_together
from polarlm.engine.state import store
from tests.cuda.emulated import EmulatedDevice
from tests.cuda.test_model_emulated import N, Talk, model_of


def sealed_arrays(fixture: str, encoded_at_once: int) -> tuple[list[np.ndarray], list[np.ndarray], list[Counter[str]]]:
    """A prompt, a turn within its last block, and a longer one → logits, what the store holds, launches of each."""
    device, launches = EmulatedDevice(checked=False), []
    ops = CudaOps(device)
    ops.encoded_at_once = encoded_at_once
    dialogue = Talk(model_of(ops, fixture, ("ring4", "ring3.5")))
    for count in (2 * N + 5, 3, 2 * N):
        device.launches.clear()
        dialogue.prompt([*range(5, 5 + count)])
        launches.append(Counter(device.launches))
    (kv,), held = dialogue.sequences, []
    for group, table in zip(dialogue.model.store.groups, kv.tables, strict=True):
        full = [group.read_full(slot, N) for slot in (table.sink, table.current) if slot is not None]
        for arrays in (*full, group.read_blocks(table.quantized) if table.quantized else {}):
            held += [np.asarray(array) for array in arrays.values()]
    return dialogue.logits, held, launches


ENCODING, COPYING = "encode_blocks_kernel", "copy_full_kernel"


@pytest.fixture(autouse=True)
def no_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_SEALED_BLOCKS", 1)


@pytest.mark.parametrize(
    ("fixture", "copies"),
    [("qwen2_mixed_windows", [2, 4, 4]), ("gemma4_shared_kv", [2, 4, 4]), ("lfm2_tied", [1, 2, 2])],
)
def test_layers_together_are_those_of_each_alone(fixture: str, copies: list[int]) -> None:
    """With windows, layers that read another one's K/V, and recurrent layers between. All blocks are encoded in one
    launch; layers that share block tables have one for what a turn takes over, and one for what stays in slots."""
    logits, held, launches = sealed_arrays(fixture, 1 << 10)
    logits_alone, held_alone, launches_alone = sealed_arrays(fixture, 1)
    np.testing.assert_equal(logits, logits_alone)
    np.testing.assert_equal(held, held_alone)
    assert [of[ENCODING] for of in launches] == [1, 0, 1]
    assert [of[COPYING] for of in launches] == copies
    assert launches_alone[0][ENCODING] == launches_alone[0][COPYING] > 1


def test_shorter_prompts_have_more_layers_together() -> None:
    """On an H200, with 8 KV heads; where one block is worth a launch, each layer is alone."""
    assert [layers_together(4 * 132, [8] * 32, tokens // 64) for tokens in (0, 256, 512, 2048, 8192)] == [
        32,
        17,
        9,
        3,
        1,
    ]
    assert [layers_together(1, [8] * 32, blocks) for blocks in (0, 100)] == [1, 1]
