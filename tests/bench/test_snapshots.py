"""What continuing from a coded snapshot costs: figures, page, interruption, and wrong input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from polarlm.bench.quality import __main__ as cost
from polarlm.bench.quality import snapshots
from polarlm.bench.result import Result, read
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.loading.assembly import assemble
from polarlm.engine.loading.checks import settle
from polarlm.engine.quantization.snapshot_codes import ALL, EIGHT_BITS, EXACT
from polarlm.engine.state.prefix import PrefixCache
from tests.conftest import TRAINED_HYBRID

HERE, MORE = 256, 40  # tokens before a snapshot and after it


@pytest.fixture(scope="module")
def ids() -> list[int]:
    """Half of a window of held-out stories, and a little more."""
    text = (TRAINED_HYBRID / "held_out.txt").read_text(encoding="utf-8")
    parts = assemble(settle(TRAINED_HYBRID, None, {"cache_type": "f16"}), None, ops=NumpyOps(1))
    try:
        return [0, *parts.source.tokenizer.tokenize(text[:4000])][: 2 * HERE]
    finally:
        parts.close()


def probabilities(ids: list[int], state_type: str) -> np.ndarray:
    """Of the tokens after each of MORE tokens, which steps of an engine with this setting add to what it finds in its
    prefix cache: the snapshot at HERE."""
    settings = {**snapshots.SETTINGS, "state_type": state_type, "ctx_size": 512}
    parts = assemble(settle(TRAINED_HYBRID, None, settings), None, ops=NumpyOps(1))
    model, store = parts.model, parts.model.store
    prefixes = PrefixCache(store)
    prompt = store.new_sequence()
    span = store.open(prompt, HERE)
    model.forward([span], ids[:HERE])
    store.commit(span)
    prefixes.release(prompt, ids[:HERE])
    figures = prefixes.match_prefix(ids)
    assert figures.length == HERE
    logits = []
    for token in ids[HERE : HERE + MORE]:
        span = store.open_step(figures)
        logits.append(np.array(model.logits(model.forward([span], [token])))[0])
        store.commit(span)
    parts.close()
    powers = np.exp(np.array(logits, np.float64) - np.max(logits, axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def test_figures_are_those_of_engines_with_these_settings(ids: list[int]) -> None:
    """Divergences computed from the steps of an engine for each state type, in float64."""
    parts = assemble(settle(TRAINED_HYBRID, None, {**snapshots.SETTINGS, "ctx_size": 512}), None, ops=NumpyOps(1))
    (figures,) = snapshots.continuations(parts.model, ids, [EIGHT_BITS])
    assert all(group.full.free == group.full.size for group in parts.model.store.groups)
    parts.close()
    p = probabilities(ids, "f32")
    for name, divergence in figures.items():
        q = probabilities(ids, name)
        kl = (p * np.log(p / q)).sum(axis=1)
        # Steps and rows of a block add in another order, which costs as much as exact snapshots do.
        np.testing.assert_allclose(divergence.kl[:MORE], kl, rtol=0.02, atol=2e-9)
        assert divergence.same_top1[:MORE].tolist() == (p.argmax(1) == q.argmax(1)).tolist()
        assert len(divergence.kl) == snapshots.LENGTH


def test_a_row_for_each_distance() -> None:
    parts = assemble(settle(TRAINED_HYBRID, None, {**snapshots.SETTINGS, "ctx_size": 512}), None, ops=NumpyOps(1))
    kl = np.arange(256) / 256
    result = Result({})
    snapshots.add_rows(result, parts.model, [EIGHT_BITS], [{"8bit": snapshots.Divergence(kl, kl < 0.5, 1 - kl)}])
    parts.close()
    exact = result.figures("tokens after it: 256", "f32")
    assert {name: row.value for name, row in exact.items()} == {
        **dict.fromkeys(("kl_mean", "kl_median", "kl_90th_percentile", "kl_99th_percentile", "kl_max"), 0.0),
        "same_top1": 1.0,
        "draft_acceptance": 1.0,
    }
    after = {row.more["tokens"]: row.value for row in result.rows("kl_max") if row.contestant == "8bit"}
    assert after == {1: 0, 16: 15 / 256, 64: 63 / 256, 256: 255 / 256}
    assert result.value("tokens after it: 256", "8bit", "kl_mean") == pytest.approx(255 / 512)
    assert result.value("tokens after it: 256", "8bit", "same_top1") == 0.5
    # Three layers of two heads: 128 × 128 codes of 8 bits and 128 scales; and three inputs of 768 channels.
    assert result.value("snapshot", "8bit", "bytes") == 3 * (2 * (128 * 128 + 128 * 4) + 3 * 768 * 4)
    assert result.value("snapshot", "8bit", "bits") == 8 * (128 * 128 + 128 * 4) / 128**2
    assert result.value("snapshot", "f32", "bytes") == 3 * (2 * 128 * 128 * 4 + 3 * 768 * 4)


def argv(text: Path, *flags: str, model: Path = TRAINED_HYBRID) -> list[str]:
    return [str(text), "--model", str(model), "--state", "--threads", "1", *flags]


def test_every_coding_is_compared_with_exact_snapshots(tmp_path: Path, capsys) -> None:
    output = tmp_path / "out.html"
    assert cost.main(argv(TRAINED_HYBRID / "held_out.txt", "-o", str(output), "--minutes", "0.01")) == 0
    figures = read(output.with_suffix(".json"))
    assert figures["complete"] is True
    assert figures["snapshots"] >= 1
    assert [who for _, who, _ in figures.parts("snapshot")] == ["f32", *(name for name in ALL if name != EXACT.name)]
    assert 0 < figures.value("tokens after it: 256", "8bit", "kl_mean") < 0.01
    rows = capsys.readouterr().out.split("\n\n")[0].splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == ["f32", *4 * ["8bit"]]
    assert "What a snapshot costs" in output.read_text(encoding="utf-8")


def test_what_was_measured_is_kept_when_it_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, continued = [], snapshots.continuations

    def interrupted(*arguments):
        if seen:
            raise KeyboardInterrupt
        seen.append(arguments)
        yield from continued(*arguments)

    monkeypatch.setattr(snapshots, "continuations", interrupted)
    output = tmp_path / "out.html"
    assert cost.main(argv(TRAINED_HYBRID / "held_out.txt", "-o", str(output), "--minutes", "5")) == 130
    figures = read(output.with_suffix(".json"))
    assert (figures["complete"], figures["snapshots"]) == (False, 1)
    assert "This page is partial" in output.read_text(encoding="utf-8")
