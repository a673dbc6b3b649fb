"""Mixtures of experts in what takes a model: the hub, grammars, and the command lines. Drafts, prefixes and
sessions of theirs are in `test_families.py`."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polarlm import fit
from polarlm.bench.quality import __main__ as cost
from polarlm.bench.quality import cache_cost
from polarlm.engine import Engine, SamplingParams
from tests.bench.test_cost import FakeSpeeds
from tests.model_loaders.hub_server import Hub, Repository
from tests.tiny import VOCABULARY, make_model

MIXTURES = ["gpt_oss_mxfp4", "qwen3_moe_normed"]
SETTINGS = {"device": "cpu", "block_size": 16, "ctx_size": 128}


@pytest.fixture(params=MIXTURES)
def mixture(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / request.param
    folder.mkdir()
    return make_model(folder, request.param)


def test_a_mixture_of_the_hub_answers(mixture: Path, hub: Hub) -> None:
    hub.repositories["user/mixture"] = Repository({path.name: path.read_bytes() for path in mixture.iterdir()})
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with Engine.load("hf:user/mixture", **SETTINGS) as fetched, Engine.load(mixture, **SETTINGS) as local:
        assert fetched.generate("the rain", params).token_ids == local.generate("the rain", params).token_ids


def test_answers_fulfil_a_grammar(mixture: Path) -> None:
    """With tokens that the grammar forces, whose rows are computed together with the next one's."""
    pytest.importorskip("llguidance")
    form = "[a-d]{6}(, [a-d]{4})* end[0-9]{8}"
    params = SamplingParams(max_tokens=100, temperature=1, grammar=f"%llguidance {{}}\nstart: /{form}/")
    prompt = np.random.default_rng(0).integers(5, VOCABULARY, 40).tolist()
    with Engine.load(mixture, **SETTINGS) as engine:
        answers = [engine.generate(prompt, replace(params, seed=seed)) for seed in range(6)]
    whole = [answer.text for answer in answers if answer.finish_reason == "stop"]
    assert len(set(whole)) > 1
    assert all(re.fullmatch(form, text) for text in whole)


def test_quality_measures_a_mixture(mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_cost, "Speeds", FakeSpeeds)
    text, output = tmp_path / "text.txt", tmp_path / "out.html"
    text.write_text("the rain in the north and the other inn on the hill\n" * 30)
    asked = [str(text), "--model", str(mixture), "--types", "f16,balanced", "--device", "cpu", "--minutes", "0.5"]
    assert cost.main([*asked, "--output", str(output)]) == 0
    rows = {row["type"]: row for row in json.loads(output.with_suffix(".json").read_text())["rows"]}
    assert 0 <= rows["f16"]["kl_mean"] < 1e-3
    assert rows["f16"]["kl_mean"] < rows["balanced"]["kl_mean"] < 1


def test_the_command_that_fit_advises_loads_a_mixture(mixture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit.main(["--device", "cpu", str(mixture)]) == 0
    *_, advised = capsys.readouterr().out.splitlines()
    assert advised.strip() == f"polarlm chat --model {mixture} --device cpu"
