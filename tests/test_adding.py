"""What docs/adding.md gives as complete is complete."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from polarlm.engine import Engine, SamplingParams, codecs
from polarlm.model_loaders import LoadError, families
from tests.bare import bare_model, prefill_logits, read_model, spread
from tests.codecs import test_contract
from tests.conftest import FIXTURES
from tests.tiny import make_model

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "adding.md"


def _example(path: str) -> str:
    """The text that the document gives for a file."""
    text = DOCUMENT.read_text(encoding="utf-8")
    example = re.search(r"^```python\n(.*?)^```", text[text.index(f"`{path}`") :], re.S | re.M)
    return example[1]


@pytest.fixture
def _int8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The document's codec, in its place."""
    text = _example("engine/codecs/int8.py")
    (tmp_path / "int8.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(codecs, "__path__", [*codecs.__path__, str(tmp_path)])
    codecs._modules.cache_clear()
    yield
    codecs._modules.cache_clear()
    sys.modules.pop("polarlm.engine.codecs.int8", None)
    vars(codecs).pop("int8", None)


def promises() -> dict[str, Callable[..., None]]:
    """Tests of the contract that take a codec's name alone, each as it is for one codec."""
    tests = {name: inspect.unwrap(test) for name, test in vars(test_contract).items() if name.startswith("test_")}
    return {
        name: test
        for name, test in tests.items()
        if {*inspect.signature(test).parameters} == {"name"} and "unknown" not in name
    }


def test_most_of_the_contract_can_be_asked_of_a_single_codec() -> None:
    assert len(promises()) > 5


@pytest.mark.usefixtures("_int8")
@pytest.mark.parametrize("promise", promises())
def test_the_codec_of_the_document_keeps_the_contract(promise: str) -> None:
    promises()[promise]("int8")


@pytest.mark.usefixtures("_int8")
def test_the_codec_of_the_document_is_a_cache_type(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with Engine.load(make_model(tmp_path / "model"), cache_type="int8", device="cpu", block_size=16) as engine:
        answer = engine.generate([5] * 40, SamplingParams(max_tokens=8, ignore_eos=True))
        assert len(answer.token_ids) == 8
        assert "int8" in engine.fit_line()


def test_the_family_of_the_document_loads_and_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen2 without windows computes the same, and calls its tensors alike; without the file it is refused."""
    folder = FIXTURES / "qwen2_bias"
    written = json.loads((folder / "config.json").read_text())
    written |= {"model_type": "seed_oss", "architectures": ["SeedOssForCausalLM"], "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(written))
    shutil.copy(folder / "model.safetensors", tmp_path)
    with pytest.raises(LoadError, match="'seed_oss', which is not supported"):
        read_model(tmp_path)
    (tmp_path / "families").mkdir()
    (tmp_path / "families" / "seed_oss.py").write_text(_example("model_loaders/families/seed_oss.py"), encoding="utf-8")
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path / "families")])
    config, weights = read_model(tmp_path)
    sys.modules.pop("polarlm.model_loaders.families.seed_oss")
    vars(families).pop("seed_oss")
    assert (config.family, config.attention.qkv_bias, config.attention.out_bias) == ("seed_oss", True, False)
    reference = np.load(folder / "reference.npz")
    logits = prefill_logits(bare_model(config, weights), reference["ids"].tolist())
    assert np.abs(logits - reference["logits"]).max() <= 1e-3 * spread(reference["logits"])
