"""Several GPUs in one process: each has some layers of a model, and the result equals one GPU's to the bit."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm import fit as command
from polarlm.engine import PromptOptions, SamplingParams
from polarlm.engine.backends.cuda.multi_device.ops import MultiDeviceOps
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import Ops
from polarlm.engine.errors import EngineError
from polarlm.engine.loading import assembly
from polarlm.engine.loading import fit as loading_fit
from polarlm.engine.loading.calibration import calibrate
from polarlm.engine.loading.checks import settle
from polarlm.engine.loading.fit import fit_device
from polarlm.engine.model.batch import StepBatch
from polarlm.engine.model.fingerprint import fingerprint
from polarlm.engine.model.kv_scales import variances
from polarlm.engine.model.weights import load_weights
from polarlm.engine.sampling.sample import greedy
from polarlm.engine.storage.copies import export, restore
from polarlm.model_loaders import load_weights as open_weights
from tests.adapters import ALL, random_changes, write_peft
from tests.conftest import FIXTURES
from tests.cuda.several_devices import LimitedDevice, Traffic
from tests.cuda.test_model_emulated import N, Talk, model_of, talk
from tests.eagle3 import make_head
from tests.pairs import mostly_slow
from tests.requests.drafters import guesses, prompts
from tests.requests.test_assistants import NAMES
from tests.requests.test_model_drafters import KINDS
from tests.tiny import assert_idle, load_tiny, make_model

CODES, FULL = ("ring4", "ring3.5"), ("f16", "f16")


def gpus(*counts: int, rooms: tuple[int, ...] = ()) -> MultiDeviceOps:
    """Cards of different sizes, two if there are no counts of layers."""
    rooms = rooms or tuple((4 - number) << 27 for number in range(len(counts) or 2))
    return MultiDeviceOps([CudaOps(LimitedDevice(number, room)) for number, room in enumerate(rooms)], counts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fixture", "types", "counts"),
    [
        ("qwen2_mixed_windows", CODES, (1, 1, 1)),
        pytest.param("qwen2_mixed_windows", FULL, (2, 1), marks=pytest.mark.slow),
        pytest.param("qwen3_moe_normed", FULL, (1, 1), marks=pytest.mark.slow),
        pytest.param("lfm2_tied", CODES, (2, 2), marks=pytest.mark.slow),
        pytest.param("granite_hybrid_tied", FULL, (2, 1), marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_one_gpu(fixture: str, types: tuple[str, str], counts: tuple[int, ...]) -> None:
    wanted = talk(model_of(CudaOps(LimitedDevice(0)), fixture, types))
    np.testing.assert_equal(talk(model_of(gpus(*counts), fixture, types)), wanted)


def test_a_step_moves_one_row_of_each_sequence_over_each_border() -> None:
    """Beside them each GPU gets the tables of the step in one upload for each input, and the host gets the ids."""
    fixture, ops = "qwen2_mixed_windows", gpus(1, 1, 1)
    devices = [part._device for part in ops.device_ops]
    dialogue = Talk(model_of(ops, fixture, FULL), 3)
    for index in range(3):
        dialogue.prompt([5, 6, 7], outputs=1, index=index)
    dialogue.step([8, 9, 10])  # what kernels keep is uploaded
    width = 4 * dialogue.model.config.hidden_size
    for device in devices:
        device.traffic = Traffic()
    model, store = dialogue.model, dialogue.model.store
    spans = [store.open_step(sequence) for sequence in dialogue.sequences]
    model.step(StepBatch(spans, [8, 9, 10], [greedy(model.config.vocab_size)] * 3)).wait()
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
        answered = [engine.generate(prompt, params) for prompt in (PROMPT, [*PROMPT[: 2 * N + 3], 9, 8])]
        assert answered[1].usage.cached_tokens >= 2 * N
        return [one.logprobs for one in answered]


@pytest.mark.slow
@pytest.mark.parametrize("types", ["f16", "balanced"])
def test_an_engine_answers_as_on_one_gpu(tmp_path: Path, types: str) -> None:
    path = make_model(tmp_path, "llama_gqa_llama3_tied")
    wanted = answers(CudaOps(LimitedDevice(0)), path, cache_type=types)
    assert answers(gpus(), path, cache_type=types, tensor_split="1,1") == wanted


@pytest.mark.parametrize(("asked", "counts"), [("3,1", [2, 1]), ("1,2", [1, 2]), ("auto", [1, 2]), (None, [1, 2])])
def test_layers_are_shared_as_asked(tmp_path: Path, asked: str | None, counts: list[int]) -> None:
    path, said = make_model(tmp_path, "qwen2_mixed_windows"), []
    config = settle(path, None, {"block_size": N, "ctx_size": 128, "cache_type": "f16", "tensor_split": asked})
    parts = assembly.assemble(config, said.append, ops=gpus(rooms=(1 << 27, 1 << 28)))
    assert [len(share.layers) for share in parts.placement.split.shares] == counts
    first, second = ("layer 0", "layers 1 to 2") if counts[0] == 1 else ("layers 0 to 1", "layer 2")
    assert f"Several GPUs: {first} on emulated GPU (cuda:0), {second} on emulated GPU (cuda:1)." in said
    assert "on the emulated GPU (cuda:0) and emulated GPU (cuda:1);" in assembly.fit_line(parts)
    for share in parts.placement.split.shares:  # what was planned is what is there
        free, total = share.device._device.memory()
        planned = share.weights + parts.plan.layer_bytes(share.layers)
        assert planned <= total - free <= planned + 2048
    parts.close()


SMALL = 240 << 10  # bytes of a GPU: too few for the whole of `llama_gqa_llama3_tied`


def loaded(tmp_path: Path, ops: Ops, said: list[str], **settings: Any) -> assembly.Parts:
    settings = {"block_size": N, "ctx_size": 64, "calibration": False, "parallel": 1, "kept_sequences": 1} | settings
    config = settle(make_model(tmp_path, "llama_gqa_llama3_tied"), None, settings)
    return assembly.assemble(config, said.append, ops=ops)


def test_other_gpus_help_where_one_is_too_small(tmp_path: Path) -> None:
    said: list[str] = []
    for room, several in ((1 << 28, False), (SMALL, True)):
        ops = CudaOps(LimitedDevice(0, room))
        opened = [CudaOps(LimitedDevice(1))]
        ops.others = lambda opened=opened: [opened.pop()]  # each takes memory of its GPU
        parts = loaded(tmp_path, ops, said)
        assert (parts.placement.split is not None) == several == (not opened)
        assert any(one.startswith("One GPU has too little memory: layer 0 on") for one in said) == several
        parts.close()
        for file in tmp_path.iterdir():
            file.unlink()


@pytest.mark.parametrize(
    ("rooms", "settings", "says"),
    [
        ((SMALL, SMALL), {"ctx_size": 60_000}, "warning: of the 60,000 tokens of context"),
        ((1 << 12, 1 << 28), {"tensor_split": "1,1"}, r"take .* on emulated GPU \(cuda:0\), but only"),
        ((1 << 28, 1 << 28), {"tensor_split": "1,2,3"}, "tensor_split=1,2,3: there are 3 shares for 2 GPUs "),
        ((1 << 28, 1 << 28), {"tensor_split": "1,x"}, "tensor_split=1,x: give a number above 0 for each GPU"),
        ((1 << 28, 1 << 28), {"tensor_split": "9,1"}, "GPU number 1 would get none of the 2 layers"),
        ((1 << 28,) * 3, {}, "the model has 2 layers with attention for 3 GPUs"),
    ],
)
def test_what_does_not_fit_is_a_sentence(
    tmp_path: Path, rooms: tuple[int, ...], settings: dict[str, Any], says: str
) -> None:
    said: list[str] = []
    try:
        loaded(tmp_path, gpus(rooms=rooms), said, **settings).close()
    except EngineError as error:
        said = [str(error)]
    assert any(re.search(says, one) for one in said), said


@mostly_slow("to_several", [True, False], [True])
def test_blocks_have_the_same_ids_and_objects_on_one_gpu_and_on_several(to_several: bool) -> None:
    """A sequence of the one continues on the other, with the same logits."""
    both = [model_of(ops, "qwen2_mixed_windows", CODES) for ops in (CudaOps(LimitedDevice(0)), gpus(2, 1))]
    dialogues = [Talk(model) for model in both]
    ids = np.random.default_rng(3).integers(5, 96, 80).tolist()
    for dialogue in dialogues:
        dialogue.prompt(ids)
    of_one, of_several = (
        [(table.sink, list(table.quantized), table.current) for table in dialogue.sequences[0].tables]
        for dialogue in dialogues
    )
    assert of_one == of_several
    there, here = dialogues if to_several else dialogues[::-1]
    snapshot = export(there.model.store, there.sequences[0], ids)
    other = Talk(here.model)
    other.sequences = [restore(here.model.store, snapshot)]
    for token in range(5, 12):
        there.step([token])
        other.step([token])
        np.testing.assert_array_equal(other.logits[-1], there.logits[-1])


def test_a_request_ends_where_one_gpu_is_full(tmp_path: Path) -> None:
    """Whichever GPU it is; nothing of the request is left, and the next one is answered."""
    path, params = make_model(tmp_path, "llama_gqa_llama3_tied"), SamplingParams(max_tokens=4, temperature=0)
    ops = gpus()
    with load_tiny(path, ops=ops, block_size=N, ctx_size=128, calibration=False, cache_type="f16") as engine:
        wanted = engine.generate(PROMPT[:40], params).token_ids
        for part in ops.device_ops:
            device = part._device
            free, _ = device.memory()
            device._room -= free - 1024
            with pytest.raises(EngineError) as caught:
                engine.generate(PROMPT, params)
            assert caught.value.code == "out_of_memory"
            device._room += free - 1024
            assert_idle(engine)
            assert engine.generate(PROMPT[:40], params).token_ids == wanted


def test_a_model_is_fitted_as_on_one_gpu() -> None:
    """Its fingerprint, what its weights say of keys and values, and its statistics on a text."""
    config, source, _ = open_weights(FIXTURES / "qwen2_mixed_windows")
    fitted = []
    for ops in (CudaOps(LimitedDevice(0)), gpus(1, 2)):
        weights = load_weights(ops, config, source)
        statistics = calibrate(ops, config, weights, range(5, 5 + 3 * N), N)
        arrays = [getattr(one, field.name) for one in statistics.values() for field in fields(one)]
        arrays += [array for one in variances(ops, config, weights, [N] * 3) for array in one]
        fitted.append((fingerprint(ops, config, weights), arrays))
    source.close()
    assert fitted[0][0] == fitted[1][0]
    np.testing.assert_equal(fitted[1][1], fitted[0][1])


def test_fit_says_what_every_gpu_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """For the plan that loading makes, and in a table."""
    path, ops = make_model(tmp_path, "qwen2_mixed_windows"), gpus(rooms=(1 << 27, 1 << 28))
    config = settle(path, None, {"tensor_split": "2,1"})
    model, source, _ = open_weights(path)
    fit = fit_device(config, "cuda", ops, model, source, ["f16"])
    source.close()
    parts = assembly.assemble(replace(config, cache_type="f16"), None, ops=ops)
    split, plan = parts.placement.split, parts.plan
    devices = fit.weights[0].cache("f16").cards
    assert [device.layers for device in devices] == [(0, 1), (2, 2)]
    assert [device.weights for device in devices] == [share.weights for share in split.shares]
    assert [device.store for device in devices] == [plan.layer_bytes(share.layers) for share in split.shares]
    assert fit.weights[0].cache("f16").tokens == plan.tokens
    assert sum(device.weights for device in devices) == fit.weights[0].bytes == parts.model.weights.bytes
    parts.close()
    monkeypatch.setattr(loading_fit, "devices", lambda device, threads=0: [("cuda", ops)])
    assert command.main(["--device", "cuda:0,1", "--tensor-split", "2,1", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = lines[lines.index("The GPUs share the layers:") + 1 :][:3]
    assert re.fullmatch(r"GPU +layers +weights +KV cache \(balanced\) +work +left", table[0])
    assert re.fullmatch(r"emulated GPU \(cuda:0\) +0 to 1 .* the fullest", table[1])
    assert re.fullmatch(r"emulated GPU \(cuda:1\) +2  .* MiB", table[2])
    assert lines[-1].endswith("--device cuda:0,1 --tensor-split 2,1")


@pytest.mark.parametrize(
    ("fixture", "settings", "says"),
    [
        ("gemma4_shared_kv", {}, "Models with embeddings of layers run on one GPU alone: name one"),
        ("qwen3_moe_normed", {"cpu_moe": "1"}, r"Experts in the computer's memory \(cpu_moe\) run on one GPU alone"),
        ("lfm2_tied", {"tensor_split": "1,3"}, "GPU number 0 would get none of the layers with attention"),
        ("llama_gqa_linear", {"tensor_split": "1,1", "spec_type": "eagle3"}, "a head reads layers of one GPU"),
    ],
)
def test_what_runs_on_one_gpu_is_refused_by_name(
    tmp_path: Path, fixture: str, settings: dict[str, Any], says: str
) -> None:
    config = settle(make_model(tmp_path, fixture), None, {"block_size": N, "calibration": False} | settings)
    if config.head is not None:
        make_head(tmp_path / "head", tmp_path)
    with pytest.raises(EngineError, match=says):
        assembly.assemble(config, None, ops=gpus())


ID, LOGPROB = attrgetter("id"), attrgetter("logprob")


@pytest.mark.slow  # of two devices, an adapter that comes meanwhile, and a draft model
def test_requests_with_adapters_and_drafts_are_answered_as_on_one_gpu(tmp_path: Path) -> None:
    """The draft model is on the last GPU."""
    path, lora, answered = tmp_path / "base", tmp_path / "lora", []
    path.mkdir()
    make_model(path)
    write_peft(lora, random_changes(path, 1, 5, ALL), 10)
    settings = {"block_size": N, "ctx_size": 64, "calibration": False, "lora": {"a": str(lora)}, "draft_max": 3}
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, logprobs=2)
    for ops in (CudaOps(LimitedDevice(0)), gpus()):
        with load_tiny(path, ops=ops, model_draft=str(path), **settings) as engine:
            answered.append(
                [engine.generate(PROMPT[:20], params, PromptOptions(lora=name)).logprobs for name in ("", "a")]
            )
            engine.unload_adapter("a")
            engine.load_adapter("b", lora)  # the same, while the engine runs
            answered[-1].append(
                engine.generate(PROMPT[:20], params, PromptOptions(lora="b", cache_prompt=False)).logprobs
            )
            on = engine._parts.draft_model.ops._device.name
    ids, logprobs = ([[[get(token) for token in one] for one in each] for each in answered] for get in (ID, LOGPROB))
    assert ids[0] == ids[1]
    np.testing.assert_allclose(logprobs[0], logprobs[1], atol=1e-4)  # steps' times decide how drafts are cut
    np.testing.assert_allclose(logprobs[0][1], logprobs[0][2], atol=1e-4)
    assert answered[0][0] != answered[0][1]
    assert on == "emulated GPU (cuda:1)"


def test_a_store_that_one_gpu_has_no_room_for_names_it(tmp_path: Path) -> None:
    """The weights fit, and not the first blocks of K/V."""
    ops, said = gpus(rooms=(1 << 28, 64 << 10)), list[str]()
    with pytest.raises(
        EngineError, match=r"^layer 1 on emulated GPU \(cuda:1\): .* for the KV store is too little"
    ) as caught:
        loaded(tmp_path, ops, said, tensor_split="1,1")
    assert caught.value.code == "out_of_memory"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fixture", "has_several"),
    [
        ("mtp", "glm4_moe_qk_norm", True),
        ("mtp", "qwen3_next_shared_keys", False),
        ("mtp", "nemotron_h_latent", False),
        ("eagle3", "llama_gqa_linear", False),
        *(("assistant", name, False) for name in NAMES),
    ],
)
def test_drafts_are_those_of_the_cpu(tmp_path: Path, kind: str, fixture: str, has_several: bool) -> None:
    """Of a layer alone on the last GPU, or beside recurrent layers, after prompts and steps."""
    KINDS[kind].make(tmp_path, fixture)
    (ids,), found = prompts(1, seed=2), []
    for backend in (gpus(3, 1) if has_several else CudaOps(LimitedDevice(0)), NumpyOps()):
        with load_tiny(tmp_path, ops=backend, spec_type=kind, block_size=N, cache_type="f16", ctx_size=128) as engine:
            drafts = [guesses(engine, ids[:end], max(1, end - 3), 3) for end in (2, 9, 20)]
            answer = engine.generate(ids[:24], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
            found.append((drafts, answer.token_ids, answer.usage.drafted_tokens > 0))
    assert found[0] == found[1]
    assert found[0][-1]
