"""What docs/adding.md gives as complete is complete."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import Engine, SamplingParams, codecs
from tests.codecs import test_contract
from tests.tiny import make_model

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "adding.md"
SHAPES = {"name": "int8", "head_dim": 48, "block_size": 16}


@pytest.fixture
def _int8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The document's codec, in its place."""
    text, *_ = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.S | re.M)
    (tmp_path / "int8.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(codecs, "__path__", [*codecs.__path__, str(tmp_path)])
    codecs._modules.cache_clear()
    yield
    codecs._modules.cache_clear()
    sys.modules.pop("engine.codecs.int8", None)
    vars(codecs).pop("int8", None)


def promises() -> list[str]:
    """Tests of the contract that every codec takes part in, those with further parameters of their own left out."""
    tests = {name: test for name, test in vars(test_contract).items() if name.startswith("test_")}
    return [
        name
        for name, test in tests.items()
        if any(mark.args == ("name", test_contract.NAMES) for mark in getattr(test, "pytestmark", ()))
        and {*inspect.signature(test).parameters} <= {*SHAPES}
    ]


def test_most_of_the_contract_can_be_asked_of_a_single_codec() -> None:
    assert len(promises()) > 10


@pytest.mark.usefixtures("_int8")
@pytest.mark.parametrize("promise", promises())
def test_the_codec_of_the_document_keeps_the_contract(promise: str) -> None:
    test = getattr(test_contract, promise)
    test(**{name: SHAPES[name] for name in inspect.signature(test).parameters})


@pytest.mark.usefixtures("_int8")
def test_the_codec_of_the_document_is_a_cache_type(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with Engine.load(make_model(tmp_path / "model"), cache_type="int8", device="cpu", block_size=16) as engine:
        answer = engine.generate([5] * 40, SamplingParams(max_tokens=8, ignore_eos=True))
        assert len(answer.token_ids) == 8
        assert "int8" in engine.fit_line()
