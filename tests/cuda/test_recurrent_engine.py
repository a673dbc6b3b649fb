"""Recurrent layers of engines on the emulated device: which are refused, what is kept of states, and whole engines."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polarlm.bench.shapes import llama
from polarlm.engine import Engine, EngineError, SamplingParams
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.delta import DeltaEnds
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.loading import assembly
from polarlm.engine.loading.sizes import check_layers
from polarlm.engine.outputs import fold
from polarlm.engine.quantization.snapshot_codes import EIGHT_BITS, EXACT
from polarlm.model_loaders.config import ChannelDelta, GatedDelta, Mamba2, Recurrent
from tests.cuda.emulated import open_device
from tests.tiny import VOCABULARY, make_model, preempt


@pytest.mark.parametrize(
    ("mixer", "block", "words"),
    [
        (GatedDelta(2, 4, 128, 128, 4), 128, "blocks of 128 tokens: choose 64"),
        (GatedDelta(2, 4, 30, 128, 4), 64, "gated delta rules .* of 8 .* of 4, not 30 and 128: choose device=cpu"),
        (GatedDelta(2, 4, 256, 64, 4), 64, "heads of gated delta rules of 256 × 64 .* memory: choose device=cpu"),
        (
            ChannelDelta(2, 2, 512, 256, 4),
            64,
            "delta rules whose channels .* of 512 × 256 .*: choose device=cpu",
        ),
        (Mamba2(2, 4, 512, 64, 4), 64, "heads of Mamba 2 of 512 × 64 .* memory: choose device=cpu"),
        (Mamba2(2, 4, 128, 66, 4), 64, "Mamba 2 .* of 8 .* of 4, not 128 and 66"),
    ],
)
def test_layers_without_kernels_are_refused(mixer: Recurrent, block: int, words: str) -> None:
    config = llama(layers=1)
    config = replace(config, layers=(*config.layers, replace(config.layers[0], mixer=mixer)))
    with pytest.raises(EngineError, match=words) as caught:
        check_layers(CudaOps(open_device()), config, block)
    assert caught.value.code == "device_unavailable"
    check_layers(NumpyOps(), config, block)


def test_states_are_kept_as_the_codes_of_numpy(rng: np.random.Generator) -> None:
    """Also of a column of zeros, and of one of tiny numbers; later changes of the states do not matter."""
    matrices, inputs = rng.standard_normal((2, 3, 8, 20)), rng.standard_normal((2, 3, 5))
    matrices[0, 1, :, 3], matrices[1, 2, :, 4] = 0, 1e-31
    ops, host = CudaOps(open_device()), NumpyOps()
    ends = DeltaEnds([0, 1], ops.to_device(matrices), ops.to_device(inputs))
    for codes in (EIGHT_BITS, EXACT):
        wanted = host.keep_states(DeltaEnds([0, 1], *map(ops.to_host, ends[1:])), codes)()
        fetch = ops.keep_states(ends, codes)
        if codes == EXACT:
            ends.matrices[:] = 0
        fields = fetch()
        assert fields.keys() == wanted.keys()
        for name, array in wanted.items():
            assert fields[name].dtype == array.dtype
            np.testing.assert_array_equal(fields[name], array)
        one = {name: array[1] for name, array in wanted.items()}
        np.testing.assert_array_equal(ops.to_host(ops.restore_states(one, codes)), host.restore_states(one, codes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fixture",
    ["qwen3_5_tied", "qwen3_next_shared_keys", "kimi_linear_nope", "granite_hybrid_tied", "nemotron_h_experts"],
)
def test_an_engine_continues_with_what_it_has_of_earlier_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fixture: str
) -> None:
    """The next turn, and prompts that leave the first one at a block's end and within one; several at a time."""
    monkeypatch.setattr(assembly, "select", lambda device, threads: (CudaOps(open_device(checked=False)), ""))
    path, ids = make_model(tmp_path, fixture), np.random.default_rng(0).integers(5, VOCABULARY, 200).tolist()
    settings = {"block_size": 16, "ctx_size": 256, "cache_type": "f16", "state_type": "f32"}
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)

    def answer(engine: Engine, prompt: list[int]) -> tuple[tuple[int, ...], int]:
        completion = engine.generate(prompt, params)
        return completion.token_ids, completion.usage.cached_tokens

    with Engine.load(path, **settings) as engine:
        first, cached = answer(engine, ids[:101])
        assert cached == 0
        turns = [[*ids[:101], *first, *ids[105:110]], [*ids[:96], *ids[110:130]], [*ids[:70], *ids[130:160]]]
        answers = [answer(engine, turn) for turn in turns]
        assert [cached for _, cached in answers] == [108, 96, 32]
        with ThreadPoolExecutor(2) as pool:
            together = list(pool.map(lambda prompt: answer(engine, prompt)[0], [turns[1], ids[160:190]]))
    for turn, (tokens, _) in zip(turns, answers, strict=True):
        with Engine.load(path, **settings) as engine:
            assert answer(engine, turn)[0][:4] == tokens[:4]
    with Engine.load(path, **settings, state_cache="10M") as engine:
        stream = engine.stream(ids[:101], params)
        chunks = [next(stream) for _ in range(5)]
        assert preempt(engine).saved is not None
        assert fold([*chunks, *stream]).token_ids == first
    assert together[0][:4] == answers[1][0][:4]
