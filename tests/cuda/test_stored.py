"""Blocks of a GPU's store on the host and back again, in the records of kernels and in the fields of codecs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from polarlm.engine import Engine, SamplingParams, records
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import Ops
from polarlm.engine.loading import assembly
from polarlm.engine.storage.copies import Snapshot, export, restore
from tests.cuda.emulated import open_device
from tests.cuda.test_model_emulated import N, Talk, model_of

TYPES = [("ring4", "ring3.5"), ("polarquant", "polarquant")]
IDS = np.random.default_rng(3).integers(5, 96, 90).tolist()


def talk(ops: Ops, types: tuple[str, str], fixture: str = "qwen2_mixed_windows") -> Talk:
    """A prompt of several blocks and two steps."""
    dialogue = Talk(model_of(ops, fixture, types))
    dialogue.prompt(IDS[:70])
    for token in IDS[70:72]:
        dialogue.step([token])
    return dialogue


def saved(dialogue: Talk) -> Snapshot:
    sequence = dialogue.sequences[0]
    return export(dialogue.model.store, sequence, [0] * sequence.length)


def stored_as(snapshot: Snapshot) -> set[str]:
    blocks = (block for blocks in snapshot.blocks.values() for block in blocks)
    return {block.header["stored_as"] for block in blocks if not block.is_full}


@pytest.mark.slow
@pytest.mark.parametrize("types", TYPES)
def test_a_restored_sequence_gives_the_same_logits_bit_for_bit(types: tuple[str, str]) -> None:
    device = CudaOps(open_device(checked=False))
    original, other = talk(device, types), Talk(model_of(device, "qwen2_mixed_windows", types))
    snapshot = saved(original)
    assert stored_as(snapshot) == {f"records {records.VERSION}"}
    other.prompt(IDS[:40])  # so that blocks lie elsewhere
    other.sequences.insert(0, restore(other.model.store, snapshot))
    for dialogue in (original, other):
        dialogue.logits.clear()
        dialogue.prompt(IDS[72:80])
        dialogue.step([IDS[80]])
    np.testing.assert_equal(other.logits, original.logits)


@pytest.mark.slow
@pytest.mark.parametrize("types", [*TYPES, ("polarpair-m4n4", "turbo3"), ("ring4+norm16", "f16")])
def test_padding_of_records_is_zero(types: tuple[str, str]) -> None:
    """Between the fields of a record and behind them are zeros, and not what was in the GPU's memory before."""
    store = talk(CudaOps(open_device(checked=False)), types).model.store
    for layer in range(len(store.shape.layers)):
        cache = store.cache(layer)
        blocks = np.arange(len(cache.keys.quantized))  # those that nobody has written as well
        for raw, layout in zip(store.ops.read_blocks(cache, blocks).values(), cache.layouts, strict=True):
            np.testing.assert_array_equal(raw, layout.pack(*layout.unpack(raw)))


def test_a_session_continues_on_either_device(tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fitted to the model once: the weights are the same on both."""
    devices = {"gpu": CudaOps(open_device(checked=False)), "cpu": NumpyOps()}

    def load(device: str) -> Engine:
        monkeypatch.setattr(assembly, "select", lambda *_: (devices[device], ""))
        return Engine.load(tiny_path, block_size=N, ctx_size=128)

    for saving, loading in (("cpu", "gpu"), ("gpu", "cpu"), ("gpu", "gpu")):
        with load(saving) as engine:
            engine.generate(IDS[:50], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
            count = engine.save_session(tmp_path / "talk")
        with load(loading) as engine:
            ids = engine.load_session(tmp_path / "talk").token_ids
            answer = engine.generate([*ids, 7], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
            assert answer.usage.cached_tokens == count == 52
