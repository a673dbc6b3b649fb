"""Weights that hold NaN or infinity: requests that read them fail with a sentence, all others are unaffected."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from polarlm.engine import Engine, EngineError, SamplingParams
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import Ops
from tests.pairs import each
from tests.random_model import random_model
from tests.tiny import assert_idle, load_tiny, make_model

BLOCK = 8
BAD = 40  # the token whose row of the embedding is damaged
PLACES = {
    "embedding": ("model.embed_tokens.weight", (BAD, 5)),
    "queries": ("model.layers.0.self_attn.q_proj.weight", (3, 7)),
    "layer 0": ("model.layers.0.mlp.down_proj.weight", (3, 7)),
    "last layer": ("model.layers.1.mlp.down_proj.weight", (3, 7)),
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
GOOD = [5 + i % 30 for i in range(44)]  # several blocks

Damage = Callable[..., Path]


@pytest.fixture
def damaged(tmp_path: Path) -> Damage:
    """damaged(place, value): the tiny model with one of its numbers replaced."""

    def write(place: str, value: float) -> Path:
        make_model(tmp_path)
        name, index = PLACES[place]
        (file,) = tmp_path.glob("*.safetensors")
        tensors = load_file(file)
        tensors[name] = tensors[name].copy()
        tensors[name][index] = value
        save_file(tensors, file)
        return tmp_path

    return write


def load(path: Path, **settings) -> Engine:
    settings = {"cache_type": "polarquant", "calibration": False, **settings}
    return Engine.load(path, device="cpu", block_size=BLOCK, **settings)


def with_bad(position: int) -> list[int]:
    return [*GOOD[:position], BAD, *GOOD[position:]]


@pytest.mark.parametrize(
    ("place", "value"),
    [("embedding", math.nan), ("queries", math.inf), ("layer 0", math.inf), ("last layer", math.nan)],
)
def test_damage_is_found_when_the_model_is_loaded(
    damaged: Damage, place: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever layer it is in: fitting takes long. In the embedding it is found while fitting."""
    monkeypatch.setattr("polarlm.engine.loading.fitting.text_ids", lambda tokenizer, count: with_bad(30))
    measured: list[object] = []
    if place != "embedding":
        monkeypatch.setattr("polarlm.engine.loading.calibration.measure", lambda *given: measured.append(given))
    with pytest.raises(EngineError, match="model's output is not finite: its weights are damaged") as caught:
        load(damaged(place, value), calibration=True)
    assert caught.value.code == "model_damaged"
    assert not measured


@pytest.mark.parametrize(
    ("fixture", "name", "value"),
    [
        ("llama_gqa_linear", "self_attn.o_proj.weight", 3e38),
        ("llama_gqa_linear", "self_attn.v_proj.weight", 1e30),
        ("qwen2_mixed_windows", "self_attn.q_proj.bias", math.inf),
        ("olmo2_post_norms", "self_attn.k_proj.weight", 3e38),
        ("olmoe_all_heads", "mlp.gate.weight", 1e30),
        ("olmoe_all_heads", "mlp.experts.1.down_proj.weight", math.nan),
    ],
)
def test_what_codes_are_fitted_to_is_damaged(fixture: str, name: str, value: float, tmp_path: Path) -> None:
    """One sentence, when the model is loaded or asked, or an answer: NumPy's warnings are errors here."""
    path = make_model(tmp_path, fixture)
    (file,) = path.glob("*.safetensors")
    tensors = {name: tensor.astype(np.float32) for name, tensor in load_file(file).items()}
    tensors[f"model.layers.0.{name}"].flat[7] = value
    save_file(tensors, file)
    errors = []
    try:
        with load(path, cache_type="balanced", calibration=True) as engine:
            engine.generate(GOOD, GREEDY)
    except EngineError as error:
        errors.append((error.code, "not finite" in str(error)))
    assert errors == [("model_damaged", True)] or (not errors and math.isfinite(value))


@pytest.mark.parametrize(("place", "value", "cache_type"), each(PLACES, [math.nan, math.inf], ["polarquant", "f16"]))
def test_generate(damaged: Damage, place: str, value: float, cache_type: str, tmp_path: Path) -> None:
    with load(damaged(place, value), cache_type=cache_type) as engine:
        for position in (2, 12, len(GOOD)):  # in the sink, in a quantized block, in the current block
            for _ in range(2):  # the second does not find the K/V of the first
                with pytest.raises(EngineError, match="not finite") as caught:
                    engine.generate(with_bad(position), GREEDY)
                assert caught.value.code == "model_damaged"
                assert_idle(engine)
        with pytest.raises(EngineError, match="nothing to save"):  # for nothing is found
            engine.save_session(tmp_path / "talk", prompt=with_bad(20))


@pytest.mark.parametrize(("place", "value", "every_token_coded"), each(PLACES, [math.inf, math.nan], [False, True]))
def test_score(damaged: Damage, place: str, value: float, every_token_coded: bool) -> None:
    with load(damaged(place, value)) as engine:
        for position in (2, 12, len(GOOD)):
            with pytest.raises(EngineError, match="not finite") as caught:
                engine.score(with_bad(position), every_token_coded=every_token_coded)
            assert caught.value.code == "model_damaged"
            assert_idle(engine)


@pytest.mark.parametrize("length", [13, 15])
def test_damage_read_in_a_step_fails_only_its_own_request(damaged: Damage, tiny_path: Path, length: int) -> None:
    """Also if the step fills a block, which no codec can encode then."""
    with load(tiny_path) as whole:
        expected = whole.generate(GOOD, GREEDY).token_ids
    draw_bad = SamplingParams(temperature=0, max_tokens=12, logit_bias={BAD: 1000.0})
    with load(damaged("embedding", math.nan), parallel=2) as engine:
        good, bad = [], []
        engine.submit(GOOD, GREEDY, into=good)
        engine.submit(GOOD[:length], draw_bad, into=bad)
        while engine.work():
            pass
        assert isinstance(bad[-1], EngineError)
        assert "not finite" in str(bad[-1])
        assert [token for chunk in good for token in chunk.token_ids] == list(expected)
        assert_idle(engine)
        assert engine.generate(GOOD[:length], GREEDY).token_ids


# -- packed weights ----------------------------------------------------------------------------------------------------

PACKED = (
    "blk.0.ffn_down",
    *(f"blk.1.{name}" for name in ("attn_v", "attn_output", "ffn_gate", "ffn_down", "ffn_norm")),
    "output_norm",
    "output",
)
TEXT = np.random.default_rng(0).integers(5, 255, 200).tolist()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """packed(name, value, row): a model in Q8_0, one of whose scales is replaced, or one value of a norm."""
    folder = tmp_path_factory.mktemp("packed")
    whole = random_model(folder)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(whole).tensors}

    def write(name: str, value: float, row: int = 0) -> Path:
        tensor, content = tensors[f"{name}.weight"], bytearray(whole.read_bytes())
        number = np.array(value, np.float32 if tensor.tensor_type == gguf.GGMLQuantizationType.F32 else np.float16)
        start = tensor.data_offset + row * tensor.data.strides[0]
        content[start : start + number.nbytes] = number.tobytes()
        (path := folder / "damaged.gguf").write_bytes(content)
        return path

    return write


@pytest.fixture(params=["NumPy", "compiled"])
def backend(request: pytest.FixtureRequest) -> Callable[[], Ops]:
    if request.param == "NumPy":
        return lambda: NumpyOps(1)
    pytest.importorskip("llvmlite")
    from polarlm.engine.backends.native.ops import NativeOps

    return lambda: NativeOps(1)


def code_of(ask: Callable[..., object], *arguments: object) -> str | None:
    """The code of the error that a call raises, None without an error."""
    try:
        ask(*arguments)
    except EngineError as error:
        return error.code
    return None


def test_a_cap_of_logits_hides_no_infinity(backend: Callable[[], Ops], tmp_path: Path) -> None:
    path = make_model(tmp_path, "gemma4_shared_kv")
    (file,) = path.glob("*.safetensors")
    tensors = {name: tensor.astype(np.float32) for name, tensor in load_file(file).items()}
    tensors["model.norm.weight"].flat[7] = math.inf
    save_file(tensors, file)
    with load_tiny(path, ops=backend(), cache_type="f16", calibration=False) as engine:
        for ask in (lambda: engine.generate(GOOD, GREEDY), lambda: engine.score(GOOD)):
            assert code_of(ask) == "model_damaged"


@pytest.mark.slow
def test_damaged_packed_weights_give_an_error(packed: Callable[..., Path], backend: Callable[[], Ops]) -> None:
    """From long and short prompts, and from scores; or when the model is loaded, if its codes are fitted to them.

    Sixteen models are loaded on each backend.
    """
    cache_types = itertools.cycle(("f16", "balanced", "balanced", "f16"))  # each file has both
    for (name, value), cache_type in zip(itertools.product(PACKED, (math.nan, math.inf)), cache_types, strict=False):
        try:
            engine = load_tiny(packed(name, value), ops=backend(), cache_type=cache_type, ctx_size=512)
        except EngineError as error:
            codes = [error.code]
        else:
            with engine:
                codes = [code_of(engine.score, ids) for ids in (TEXT, TEXT[:3])]
                # In NumPy, as on a GPU, a logit of −infinity is a token that is never drawn.
                if (name, value) != ("output", math.inf) or engine._model.ops.backend != "numpy":
                    codes += [code_of(engine.generate, ids, GREEDY) for ids in (TEXT, TEXT[:3])]
                assert_idle(engine)
        assert set(codes) == {"model_damaged"}, (name, value, cache_type)
