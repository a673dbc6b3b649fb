"""Models of the hub in an engine."""

from __future__ import annotations

import pytest

from polarlm.bench.command import model_named
from polarlm.engine import Engine, EngineConfig, EngineError
from polarlm.engine.backends.select import select
from polarlm.engine.chat import terminal
from polarlm.engine.chat.config import read_command_line as chat_flags
from polarlm.engine.loading.checks import settle
from polarlm.engine.loading.placement.request import fit_check
from polarlm.model_loaders import load_weights
from polarlm.server.config import read_command_line as server_flags
from tests.model_loaders.checkpoints import MODELS
from tests.model_loaders.hub_server import Hub, Repository

SETTINGS = {"device": "cpu", "ctx_size": 128, "calibration": False}


def test_the_quantization_is_one_that_fits(
    hub: Hub, small_ggufs: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["user/tiny"] = Repository(small_ggufs)
    small, large = sorted(map(len, small_ggufs.values()))
    ops, _ = select("cpu", 1)
    refuse = EngineError("too large", "out_of_memory")

    def memory_left(self: object, weights: int) -> int:
        if weights > (small + large) // 2:
            raise refuse
        return 1 << 30

    monkeypatch.setattr(type(ops), "memory_left", memory_left)
    with Engine.load("hf:user/tiny", **SETTINGS) as engine:
        assert engine.model.dtype == "Q4_K"


def test_the_kv_store_of_the_context_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, _ = select("cpu", 1)
    model = load_weights(MODELS / "llama_mha")[0]
    per_token = (
        2 * 4 * len(model.layers) * model.attention.kv_heads * model.attention.head_dim
    )  # bytes in float32, at most
    monkeypatch.setattr(type(ops), "memory_left", lambda self, weights: 256 * per_token)
    for context, expected in ((64, True), (1 << 20, False)):
        config = EngineConfig(ctx_size=context, parallel=1, kept_sequences=0)
        assert fit_check(config, ops)(model, 1000) is expected
    assert fit_check(EngineConfig(), ops)(None, 1000)


def test_the_flag_names_a_model_without_the_prefix() -> None:
    for name in ("user/tiny:q4_k_m", "hf:user/tiny:q4_k_m"):
        for flag in ("-hf", "--hf-repo"):
            config, *_ = chat_flags([flag, name])
            assert settle(None, config, {}).weights == "hf:user/tiny:q4_k_m"
            config, *_ = server_flags([flag, name])
            assert settle(None, config, {}).weights == "hf:user/tiny:q4_k_m"
        assert model_named(None, name) == "hf:user/tiny:q4_k_m"
        assert model_named("a/path", None) == "a/path"


def test_the_chat_takes_a_name(hub: Hub, small_ggufs: dict[str, bytes], capsys: pytest.CaptureFixture[str]) -> None:
    hub.repositories["user/tiny"] = Repository(small_ggufs)
    flags = ["-hf", "user/tiny:q4_k_m", "-c", "128", "--device", "cpu", "--no-calibration", "-n", "4", "--temp", "0"]
    assert terminal.main([*flags, "-no-cnv", "-p", "the"]) == 0
    assert "tiny · Q4_K, " in capsys.readouterr().err
    assert terminal.main(["-hf", "user/none", "-p", "the"]) == 2
    assert "error: There is no model user/none on the hub" in capsys.readouterr().err
