"""Where divergence comes from: the parts are those of real prompts, and the share of attention is counted rightly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from polarlm.bench.quality.causes import ALL, SERVED, Depth, measure
from polarlm.bench.quality.coded_prompt import whole_store

from polarlm.bench.quality import causes
from polarlm.bench.quality.divergence import compare
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.loading.assembly import Parts, assemble
from polarlm.engine.loading.checks import settle
from polarlm.engine.model.forward import Transformer
from tests.bare import bare_model, prefill_logits, read_model

IDS = np.random.default_rng(5).integers(5, 90, 256).tolist()
BLOCK = 64


def assembled(path: Path, cache_type: str, threads: int = 1) -> tuple[Parts, dict[str, Any]]:
    settings = {"ctx_size": len(IDS), "kept_sequences": 0, "parallel": 1, "cache_type": cache_type}
    return assemble(settle(path, None, settings), None, ops=NumpyOps(threads)), settings


@pytest.fixture(params=["compact", "f16"])
def parts(request: pytest.FixtureRequest, tiny_path: Path) -> Iterator[tuple[Parts, dict[str, Any]]]:
    found = assembled(tiny_path, request.param)
    yield found
    found[0].close()


def only_depth(parts: Parts, settings: dict[str, Any]) -> Depth:
    (depth,) = measure(parts.model, whole_store(parts.model, settings), [IDS])
    assert depth.tokens == 128
    return depth


def test_codes_are_those_of_a_prompt(tiny_path: Path, parts: tuple[Parts, dict[str, Any]]) -> None:
    """`all codes` is what a store finds that has read the same tokens as one prompt."""
    model, (config, weights) = parts[0].model, read_model(tiny_path)
    exact = prefill_logits(bare_model(config, weights, block_size=len(IDS) + 4), IDS)
    expected = []
    for length in (128, 128 + BLOCK):
        sequence = model.store.new_sequence()
        for ids in (IDS[:length], IDS[length : length + BLOCK]):
            span = model.store.open(sequence, len(ids))
            hidden = model.forward([span], ids)
            model.store.commit(span)
        expected.append(compare(exact[length : length + BLOCK], model.logits(hidden)).kl)
        model.store.release(sequence)
    found = only_depth(*parts)
    if parts[1]["cache_type"] == "f16":
        assert max(found.kl[ALL]) < 1e-4
    else:
        # Keys and values are rounded to halves before they are encoded, and a few codes fall to the other side; of two
        # norms that cost about the same, a key may take the other one, and with it other codes.
        wanted = np.concatenate(expected)
        assert np.median(np.abs(found.kl[ALL] / wanted - 1)) < 0.02
        np.testing.assert_allclose(found.kl[ALL], wanted, rtol=0.5)
        assert np.mean(found.kl[ALL]) > 1e-4
        assert 0 < np.mean(found.kl["keys"]) < np.mean(found.kl[ALL])
        assert 0 < np.mean(found.kl["values"]) < np.mean(found.kl[ALL])
        assert all(0.01 < error < 0.5 for errors in found.errors.values() for error in errors)
    # All of these prompts is new, so there is nothing older.
    assert found.kl["newest"] == found.kl[ALL]
    assert max(found.kl["older"]) < 1e-6
    assert len(found.kl[SERVED]) == len(found.on_codes) == 2 * BLOCK


@pytest.mark.parametrize("threads", [1, 2])
def test_uniform_attention_reads_codes_by_their_number(tiny_path: Path, threads: int) -> None:
    """With several threads the rows of a prompt come in parts."""
    parts, settings = assembled(tiny_path, "compact", threads)
    try:
        model = parts.model
        config = model.config.with_attention(lambda mixer: replace(mixer, scale=1e-30))
        uniform = replace(parts, model=Transformer(model.ops, config, model.weights, model.store))
        found = only_depth(uniform, settings).on_codes
    finally:
        parts.close()
    wanted = [(length - BLOCK) / (length + row + 1) for length in (128, 192) for row in range(BLOCK)]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_the_command(tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text("the rain in the north and the other inn on the hill\n" * 40, encoding="utf-8")
    flags = ["--text", str(text), "--weights", str(tiny_path), "--window", "256", "--output", str(output)]
    assert causes.main([*flags, "--windows", "1"]) == 0
    (depth,) = json.loads(output.read_text(encoding="utf-8"))["depths"]
    assert depth["positions"] == 2 * BLOCK
    assert capsys.readouterr().out.splitlines()[-1].startswith("| 128 ")
    assert causes.main([*flags, "--windows", "9"]) == 2
    assert "is too short for 9 windows of 256" in capsys.readouterr().err
