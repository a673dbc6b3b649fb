"""The quality measurement: its arithmetic, its windows, and a whole run on a small real model.

The parts that have a file of their own in `bench` are tested in one of their own here, too.
"""

from __future__ import annotations

import doctest
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from polarlm.bench.quality.reference import Reference

from polarlm.bench import command, report
from polarlm.bench.command import CacheType, cache_types
from polarlm.bench.quality import __main__ as quality
from polarlm.bench.quality import needle, plots, scores
from polarlm.bench.quality.divergence import Divergence, compare, perplexity
from polarlm.bench.quality.scores import Quality, Stretch, by_position, measure, windows
from polarlm.engine.cli.flags import FlagError
from tests.shared_data import shared

logits = st_numpy.arrays(np.float32, (3, 5), elements=st.floats(-30, 30, width=32))


# -- arithmetic ----------------------------------------------------------------------------------------------------


@given(logits)
def test_a_distribution_does_not_diverge_from_itself(x: np.ndarray) -> None:
    same = compare(x, x)
    assert (same.kl == 0).all()
    assert same.same_top1.all()


@given(logits, st.floats(-5, 5, width=32))
def test_a_constant_added_to_all_logits_changes_no_distribution(x: np.ndarray, constant: float) -> None:
    # Float32 rounds the sum to 35 · 2⁻²⁴, which moves ln q by twice that at most.
    assert (compare(x, x + np.float32(constant)).kl <= 4 * 35 * 2.0**-24).all()


def test_divergence_of_two_tokens_by_hand() -> None:
    """p = (1/4, 3/4) against q = (1/2, 1/2): ¼·ln(½) + ¾·ln(3/2)."""
    exact = np.array([[0, np.log(3)]], np.float32)
    other = np.array([[1, 1]], np.float32)
    assert compare(exact, other).kl[0] == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), abs=1e-7)


def test_divergence_matches_its_definition_in_every_row(rng: np.random.Generator) -> None:
    """Σ p·ln(p/q), over more rows than are computed at once."""
    exact, other = rng.normal(0, 3, (2, 150, 11)).astype(np.float32)
    p, q = (np.exp(x.astype(np.float64)) for x in (exact, other))
    p, q = p / p.sum(axis=1, keepdims=True), q / q.sum(axis=1, keepdims=True)
    found = compare(exact, other)
    np.testing.assert_allclose(found.kl, (p * np.log(p / q)).sum(axis=1), rtol=1e-12)
    assert found.same_top1.tolist() == [p[t].argmax() == q[t].argmax() for t in range(150)]
    assert 0 < found.same_top1.mean() < 1


def test_large_logits_do_not_overflow() -> None:
    assert compare(np.array([[1e4, 0]], np.float32), np.array([[1e4, 9e3]], np.float32)).kl[0] == 0


@given(st.integers(2, 1000), st.integers(1, 50))
def test_perplexity_of_uniform_guessing_is_the_number_of_choices(choices: int, count: int) -> None:
    assert perplexity(np.full(count, -np.log(choices), np.float64)) == pytest.approx(choices)


def test_divergence_by_position_by_hand() -> None:
    """Two windows of 300 and 129 positions: the second one reaches one position of the second stretch."""
    long, short = np.repeat([1.0, 2.0, 6.0], [128, 128, 44]), np.repeat([3.0, 131.0], [128, 1])
    same = [np.repeat([True, False, True], [128, 128, 44]), np.repeat([False, True], [128, 1])]
    assert by_position([Divergence(*both, both[0]) for both in zip((long, short), same, strict=True)]) == [
        Stretch(0, 128, 256, 2.0, pytest.approx(0.5**0.5, rel=0.1), 0.5, pytest.approx(0.125**0.5, rel=0.1)),
        Stretch(
            128, 256, 129, (128 * 2 + 131) / 129, pytest.approx(55.6, rel=0.15), 1 / 129, pytest.approx(0.43, rel=0.15)
        ),
        Stretch(256, 300, 44, 6.0, None, 1.0, None),
    ]


@given(st.lists(st.integers(1, 700), min_size=1, max_size=4))
def test_stretches_of_positions_are_the_whole_text(lengths: list[int]) -> None:
    kl = [np.random.default_rng(length).random(length) for length in lengths]
    stretches = by_position([Divergence(one, one > 0.5, one) for one in kl])
    assert [one.start for one in stretches[1:]] == [one.end for one in stretches[:-1]]
    assert (stretches[0].start, stretches[-1].end) == (0, max(lengths))
    assert sum(one.positions for one in stretches) == sum(lengths)
    total = sum(one.positions * one.kl_mean for one in stretches)
    assert total == pytest.approx(np.concatenate(kl).sum())
    same = sum(one.positions * one.same_top1 for one in stretches)
    assert same == pytest.approx((np.concatenate(kl) > 0.5).sum())


# -- windows and cache types ---------------------------------------------------------------------------------------


@given(st.lists(st.integers(5, 99), max_size=40), st.integers(2, 12))
def test_with_a_bos_every_id_of_the_text_is_predicted_once(ids: list[int], window: int) -> None:
    cut = windows(ids, window, bos_id=1)
    assert all(one[0] == 1 and len(one) <= window for one in cut)
    assert [i for one in cut for i in one[1:]] == ids


@given(st.lists(st.integers(5, 99), max_size=40), st.integers(2, 12))
def test_without_a_bos_the_first_id_of_each_window_is_only_read(ids: list[int], window: int) -> None:
    cut = windows(ids, window, bos_id=None)
    assert all(2 <= len(one) <= window for one in cut)
    joined = [i for one in cut for i in one]
    assert joined == ids[: len(joined)]
    assert len(ids) - len(joined) <= 1, "only a single last id has nothing to predict it from"


def test_cache_types_of_a_command_line() -> None:
    assert cache_types("f16, polarquant/f16,f16") == [
        CacheType("f16", "f16", "f16", True),
        CacheType("polarquant/f16", "polarquant", "f16", True),
    ]
    (plain,) = cache_types("polarquant,polarquant:plain", key_conditioning=False)
    assert plain == CacheType("polarquant:plain", "polarquant", "polarquant", False)
    assert plain.settings()["key_conditioning"] is False


def test_types_for_some_layers_belong_to_the_type_before_them() -> None:
    assert cache_types("ring3/ring3.5, ring5@1-2, f16@3,ring3,ring5@1/ring3.5:plain", by_layer=True) == [
        CacheType("ring3/ring3.5,ring5@1-2,f16@3", "ring3", "ring3.5,ring5@1-2,f16@3", True),
        CacheType("ring3,ring5@1/ring3.5:plain", "ring3,ring5@1", "ring3.5", False),
    ]
    with pytest.raises(FlagError, match="--types ring3,int9@1: There is no cache type 'int9'"):
        cache_types("ring3,int9@1", by_layer=True)
    with pytest.raises(FlagError, match="There is no cache type 'ring5@1'"):
        cache_types("ring3,ring5@1")  # for what knows one type alone


def test_a_codec_that_does_not_support_the_head_dim_is_refused_by_name() -> None:
    with pytest.raises(FlagError, match=r"--types f16/polarquant: .*7"):
        CacheType.read("f16/polarquant").check(head_dim=7)


# -- a small real model --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference() -> dict:
    """Per-window NLL of stories260K by a second implementation."""
    return json.loads(shared("models", "stories260K", "reference_ppl.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def measured(reference: dict) -> Quality:
    """The reference's windows, scored with f16 and with polarquant as published and as served here."""
    text = shared("text", reference["text"]).read_text(encoding="utf-8")
    with Reference(str(shared("models", "stories260K")), reference["window"]) as model:
        ids = model.tokenize(text)[: reference["text_ids"]]
        assert ids[: len(reference["first_ids"])] == reference["first_ids"]
        cut = windows(ids, reference["window"], model.model.tokenizer.bos_id)
        assert [len(one) - 1 for one in cut] == [count for count, _ in reference["per_window"]]
        return measure(model, cache_types("f16,polarquant,polarquant:plain"), cut)


@pytest.mark.slow
def test_full_precision_reproduces_the_reference(measured: Quality, reference: dict) -> None:
    """Float32 on both sides, summed in different orders."""
    assert measured.scored_tokens == reference["scored"]
    assert math.log(measured.exact_perplexity) == pytest.approx(reference["nll_per_token"], abs=1e-4)


@pytest.mark.parametrize("row", [0, 1])
def test_f16_reproduces_the_reference(measured: Quality, reference: dict, row: int) -> None:
    assert measured.rows[row].type == "f16"
    assert measured.rows[row].nll_per_token == pytest.approx(reference["nll_per_token"], abs=1e-3)
    # Half precision rounds to one part in 2000: far below what any code costs.
    assert measured.rows[row].kl_mean < 1e-4
    assert measured.rows[row].bits_per_value == 16


def test_errors_have_the_order_of_the_methods(measured: Quality) -> None:
    """Quantization costs quality, more quantized tokens cost more, and conditioning is worth its bits."""
    rows = {(row.type, row.scored_as): row for row in measured.rows}
    assert len(rows) == 6
    f16, served, coded, plain = (
        rows[key]
        for key in (
            ("f16", "as served"),
            ("polarquant", "as served"),
            ("polarquant", "every token coded"),
            ("polarquant:plain", "as served"),
        )
    )
    assert f16.kl_mean < served.kl_mean < coded.kl_mean
    assert served.kl_mean < plain.kl_mean
    assert served.kl_mean < served.kl_99th_percentile
    assert f16.same_top1 > served.same_top1 > coded.same_top1 > 0
    # Attention errs as the whole model does, in every layer.
    for small, large in ((f16, served), (served, coded)):
        assert all(0 <= a < b for a, b in zip(small.attention_error, large.attention_error, strict=True))
    # Block means of the keys alone: 8 bits for each channel, and 16 for the scale of each 8 channels, over 64 tokens.
    assert served.bits_per_value - plain.bits_per_value == pytest.approx((8 + 16 / 8) / 64 / 2)


def test_where_nothing_is_coded_hardly_anything_is_lost(measured: Quality) -> None:
    """The first two blocks have no codes as served: they are the first and the current one, as halves."""
    served, coded = (row for row in measured.rows if row.type == "polarquant")
    assert served.by_position[0].kl_mean < 1e-5 < coded.by_position[0].kl_mean
    assert all(one.kl_mean > 1e-5 for one in served.by_position[1:])
    assert len(served.by_position) > 1


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than the measurement."""
    monkeypatch.setattr(plots, "draw_all", lambda *given: "No pictures")


STORY = "Once upon a time, there was a little girl named Lily.\nShe loved to play outside in the park.\n" * 12


def run(text: Path, output: Path, *flags: str) -> int:
    model = str(shared("models", "stories260K"))
    return quality.main(["--weights", model, "--text", str(text), "--output", str(output), "--window", "128", *flags])


def test_the_table_comes_last_and_the_file_says_how_it_was_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, output = tmp_path / "story.txt", tmp_path / "out.json"
    text.write_text(STORY, encoding="utf-8")
    assert run(text, output, "--windows", "2", "--types", "f16,polarquant") == 0
    *_, about, whole, kl, same = capsys.readouterr().out.strip().split("\n\n")
    assert len(whole.splitlines()) == 7, "header, rule, full precision and two types twice"
    labels = [f"{type}, {scored}" for type in ("f16", "polarquant") for scored in ("as served", "every token coded")]
    for table in (kl, same):
        assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == labels
    assert "nats" in about
    found = json.loads(output.read_text(encoding="utf-8"))
    assert {"machine", "date", "command"} <= found.keys()
    assert "python -m polarlm.bench.quality --weights " in found["command"]  # behind variables that matter
    assert found["machine"]["cores"] >= 1
    assert found["threads"] == found["machine"]["blas_threads"] == report.blas_threads()
    assert found["complete"] is True
    assert (found["windows"], found["scored_tokens"]) == (2, 2 * 127)
    assert [row["type"] for row in found["rows"]] == ["f16", "f16", "polarquant", "polarquant"]


def test_line_ends_do_not_matter(tmp_path: Path) -> None:
    results = []
    for name, text in (("lf", STORY), ("crlf", STORY.replace("\n", "\r\n"))):
        file, output = tmp_path / name, tmp_path / f"{name}.json"
        file.write_bytes(text.encode())
        assert run(file, output, "--types", "f16", "--windows", "1") == 0
        results.append(json.loads(output.read_text(encoding="utf-8"))["rows"])
    assert results[0] == results[1]


def test_conditioning_can_be_switched_off_for_all_types(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "story.txt"
    text.write_text(STORY, encoding="utf-8")
    assert run(text, tmp_path / "out.json", "--types", "polarquant", "--windows", "1", "--no-key-conditioning") == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("| polarquant:plain, every token coded |")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--text", "{tmp}/none.txt"], "--text {tmp}/none.txt cannot be read: No such file or directory"),
        (["--text", "{tmp}/latin1.txt"], "--text {tmp}/latin1.txt is not UTF-8 text"),
        (["--text", "{tmp}/empty.txt"], "--text {tmp}/empty.txt is too short"),
        (["--types", "int3"], "--types int3: There is no cache type 'int3'"),
        (["--types", "f16,"], "--types : There is no cache type ''"),
        (["--window", "1"], "--window: must be at least 2"),
        (["--window", "4096"], "--window 4096 is more than the 512 tokens of context that stories260K has"),
        (["--windows", "0"], "--windows: must be at least 1"),
        (["--weights", "{tmp}/none.gguf"], "{tmp}/none.gguf does not exist"),
        (["--output", "{tmp}/none/out.json"], "--output {tmp}/none/out.json cannot be written"),
        (["--output", "{tmp}"], "--output {tmp} is a folder"),
        (["--key-bias", "nan"], "--key-bias: must be from 0 to 1000"),
        (["--ablate", "int3"], "--ablate int3: There is no cache type 'int3'"),
        (["--needle", "--needle-depths", "101"], "--needle-depths takes whole numbers up to 100, separated by commas"),
        (["--needle", "--needle-lengths", "4k"], "--needle-lengths takes whole numbers, separated by commas, not '4k'"),
        (["--needle"], "--needle-lengths 4096 is more than the 512 tokens of context that stories260K has"),
        (["--needle", "--needle-lengths", "20"], "--needle-lengths 20: there is no room for a haystack"),
        (["--needle", "--needle-lengths", "500"], "--needle-lengths 500: --text has only"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    flags: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "story.txt"
    text.write_text(STORY, encoding="utf-8")
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").touch()
    # A flag that is given twice has its last value.
    assert run(text, tmp_path / "out.json", *(flag.format(tmp=tmp_path) for flag in flags)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1].startswith(f"error: {sentence.format(tmp=tmp_path)}")
    assert "Traceback" not in printed.err


def test_a_missing_text_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert quality.main([]) == 2
    assert capsys.readouterr().err.startswith("error: --text is missing: give a UTF-8 text file")


@pytest.mark.parametrize("module", [command, needle, report])
def test_examples_in_the_documentation_hold(module: object) -> None:
    tried = doctest.testmod(module)  # type: ignore[arg-type]
    assert tried.attempted > 0
    assert tried.failed == 0


def test_results_are_kept_when_the_command_is_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, output, of_type = tmp_path / "story.txt", tmp_path / "out.json", scores._measure_type
    text.write_text(STORY, encoding="utf-8")

    def stopped_at_the_second(reference, exact, logprobs, cache_type, *rest):
        if cache_type.label != "f16":
            raise KeyboardInterrupt
        return of_type(reference, exact, logprobs, cache_type, *rest)

    monkeypatch.setattr(scores, "_measure_type", stopped_at_the_second)
    assert run(text, output, "--windows", "1", "--types", "f16,ring4,polarquant") == 130
    found = json.loads(output.read_text(encoding="utf-8"))
    assert [row["type"] for row in found["rows"]] == ["f16", "f16"]
    assert found["complete"] is False
    messages = capsys.readouterr().err
    assert "3 cache types on 1 windows of 128 tokens" in messages
    assert "f16, every token coded: perplexity " in messages
    assert messages.endswith("Stopped\n")
