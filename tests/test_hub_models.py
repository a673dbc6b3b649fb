"""Models of the hub in an engine."""

from __future__ import annotations

import pytest

from polarlm.engine import Engine, EngineConfig, EngineError
from polarlm.engine.backends.select import select
from polarlm.engine.encoding import WHOLE
from polarlm.engine.sizes import fits_beside
from polarlm.model_loaders import load_weights
from tests.model_loaders.checkpoints import MODELS
from tests.model_loaders.hub_server import Hub, Repository

SETTINGS = {"device": "cpu", "ctx_size": 128, "calibration": False}


def test_a_model_of_the_hub_answers(hub: Hub, small_ggufs: dict[str, bytes]) -> None:
    hub.repositories["user/tiny"] = Repository(small_ggufs)
    with Engine.load("hf:user/tiny", **SETTINGS) as engine:
        assert engine.model.name == "tiny"
        assert engine.model.dtype == "Q8_0"
        assert engine.generate("the", None).usage.completion_tokens > 0


def test_the_quantization_is_one_that_fits(
    hub: Hub, small_ggufs: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["user/tiny"] = Repository(small_ggufs)
    small, large = sorted(map(len, small_ggufs.values()))
    ops, _ = select("cpu", 1)
    refuse = EngineError("too large", "out_of_memory")

    def room_beside(self: object, weights: int) -> int:
        if weights > (small + large) // 2:
            raise refuse
        return 1 << 30

    monkeypatch.setattr(type(ops), "room_beside", room_beside)
    with Engine.load("hf:user/tiny", **SETTINGS) as engine:
        assert engine.model.dtype == "Q4_K"


def test_a_problem_of_the_hub_is_an_error_of_the_engine(hub: Hub) -> None:
    with pytest.raises(EngineError, match="There is no model user/none on the hub") as caught:
        Engine.load("hf:user/none", device="cpu")
    assert caught.value.code == "model_unavailable"


def test_the_kv_store_of_the_context_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, _ = select("cpu", 1)
    model = load_weights(MODELS / "llama_mha")[0]
    per_token = 2 * 4 * model.layers * model.kv_heads * model.head_dim  # bytes in float32, at most
    monkeypatch.setattr(type(ops), "room_beside", lambda self, weights: 256 * per_token)
    for context, expected in ((64, True), (1 << 20, False)):
        config = EngineConfig(ctx_size=context, parallel=1, kept_sequences=0)
        assert fits_beside(config, WHOLE, ops)(model, 1000) is expected
    assert fits_beside(EngineConfig(), WHOLE, ops)(None, 1000)
