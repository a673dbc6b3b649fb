"""`polarlm quality`: figures, page, budget, interruption, and wrong input."""

from __future__ import annotations

import hashlib
import html
import io
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from polarlm.bench.command import CacheType
from polarlm.bench.quality import __main__ as cost
from polarlm.bench.quality import cache_cost, speeds, survey, types
from polarlm.bench.result import Result, read, today
from polarlm.engine import codecs
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.loading.encoding import Encoding
from tests.bare import read_model
from tests.model_loaders.hub_server import Hub, Repository

TEXT = "the rain in the north and the other inn on the hill\n" * 40
TYPES = ["f16", "ring3"]
QUICKLY = ["--minutes", "0.02"]
MINE = """
from dataclasses import replace
from polarlm.engine.codecs import ring

NAMES = ("mine3",)


def create(name, options):
    return replace(ring.create("ring3", options), name=name)
"""


class Clock:
    """Seconds that pass only when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy computes figures of limited time, too: nothing is compiled."""
    monkeypatch.setattr(cache_cost, "select", lambda device, threads: (NumpyOps(threads), ""))


@pytest.fixture
def no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_cost._Measurement, "_measure_speed", lambda self, ids: None)


def argv(model: Path, text: Path | str, *flags: str) -> list[str]:
    return [str(text), "--model", str(model), "--types", ",".join(TYPES), "--device", "cpu", *flags]


def result(output: Path) -> tuple[Result, str]:
    """The figures, and the text of the page."""
    return read(output.with_suffix(".json")), html.unescape(output.read_text(encoding="utf-8"))


def kl(figures: Result, who: str) -> float:
    return figures.value("text", who, "kl_mean") or 0.0


def test_figures_are_of_the_same_windows_and_say_of_what(tiny_path: Path, text: Path, no_speed: None, capsys) -> None:
    output, weights = text.with_name("out.html"), [*tiny_path.glob("*.safetensors")]
    assert cost.main(argv(tiny_path, text, "--output", str(output), *QUICKLY)) == 0
    figures, page = result(output)
    assert figures["complete"] is True
    assert list(figures["types"]) == TYPES
    row = figures.figures("text", "ring3")
    assert kl(figures, "f16") < 1e-5 < kl(figures, "ring3") < row["kl_99th_percentile"].value
    printed, *_, line = capsys.readouterr().out.strip().split("\n\n")
    assert [line.split("|")[1].strip() for line in printed.splitlines()[2:]] == ["full precision", *TYPES]
    assert f" {figures.value('room', 'ring3', 'bits_per_value'):.2f} |" in printed.splitlines()[-1]
    assert f"{row['perplexity'].value:.3f}" in page
    # What they are of stands once, which a reader can check, with the load of the machine.
    digests = [hashlib.sha256(data).hexdigest() for data in (TEXT.encode(), *(f.read_bytes() for f in weights))]
    assert [figures["text_sha256"], figures["model_sha256"]] == digests
    assert figures["text_bytes"] == len(TEXT)
    of, load = line.splitlines()
    assert all(digest[:12] in of for digest in digests)
    assert page.count(of) == page.count(load.removeprefix("load: ")) == 1
    # KL by position is of the same positions as the mean of all, and each window has its value.
    stretches = [at["kl_mean"] for subject, who, at in figures.parts(prefix="positions") if who == "ring3"]
    assert sum(one.more["positions"] for one in stretches) == figures["scored_tokens"]
    for name in ("kl_mean", "same_top1"):
        parts = [figures.figures(one.subject, "ring3")[name] for one in stretches]
        whole = sum(one.more["positions"] * one.value for one in parts) / figures["scored_tokens"]
        assert whole == pytest.approx(row[name].value), name
    assert len(row["kl_mean"].runs) == len(row["nll_per_token"].runs) == figures["windows"]


@pytest.mark.slow  # the engine's speed is measured
def test_a_page_needs_nothing_beside_it(hub: Hub, small_ggufs: dict[str, bytes], text: Path, capsys) -> None:
    """With real speed, of a model of the hub; it goes to the current folder."""
    hub.repositories["user/tiny"] = Repository(small_ggufs)
    assert cost.main(argv(Path("-"), text, "--model", "hf:user/tiny", "--minutes", "10")) == 0
    (output,) = text.parent.glob("quality-*.html")
    figures, page = result(output)
    assert not re.findall(r'(?:src|href)="[^#]', page)
    assert all(sentence in page for sentence in ("text.txt", figures["command"], figures["machine"]["cpu"], "<svg"))
    assert output.name == f"quality-tiny-q8-0-text-{today()}.html"
    measured = (("speed", "f16", "generation"), ("speed", "f16", "prompt"), ("room", "ring3", "tokens"))
    assert all(figures.value(*one) > 0 for one in measured)
    assert str(output) in capsys.readouterr().err


def test_standard_input_can_be_the_text(tiny_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT))
    assert cost.main(argv(tiny_path, "-", "-o", "out.html", "--windows", "1")) == 0
    assert result(Path("out.html"))[0]["text"] == "standard input"


def timed(monkeypatch: pytest.MonkeyPatch, clock: Clock, token_seconds: float) -> None:
    """Let every window of a type take so long for each token."""
    scored = survey.score_of

    def counted(*arguments):
        clock.now += token_seconds * len(arguments[-1])
        return scored(*arguments)

    monkeypatch.setattr(survey, "score_of", counted)


@pytest.mark.usefixtures("no_speed")
@pytest.mark.parametrize(
    ("minutes", "pass_seconds", "count", "most"),
    [(10, 0.1, 4, 600), (2, 10.0, 3, 120), (1, 40.0, 2, 3 * 10 + 3 * 20 + 2 * 40)],
)
def test_a_slow_machine_compares_the_first_types_and_says_which_it_leaves_out(
    minutes: int,
    pass_seconds: float,
    count: int,
    most: float,
    tiny_path: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys,
) -> None:
    """Within the minutes; where these are over after loading three types and the probe, two types are compared still.
    To load a type takes ten seconds."""
    clock, load = Clock(), survey.replace_cache

    def slowly(*arguments, **more):
        clock.now += 10
        return load(*arguments, **more)

    monkeypatch.setattr(survey, "replace_cache", slowly)
    timed(monkeypatch, clock, pass_seconds / 256)
    names = ["f16", "balanced", "compact", "quality"]
    words = [*argv(tiny_path, text, "-o", "out.html"), "--minutes", str(minutes), "--types", ",".join(names)]
    cache_cost.measure(cost.read_options(words), words, clock)
    assert list(result(Path("out.html"))[0]["types"]) == names[:count]
    assert clock.now <= most
    sentence = f"{', '.join(names[count:])} {'is' if count == 3 else 'are'} left out: give more --minutes"
    assert (sentence in capsys.readouterr().out) is (count < 4)


@pytest.mark.parametrize(("passes", "types"), [(1, ["f16"]), (3, TYPES)])
def test_what_was_measured_is_kept_when_it_is_stopped(
    passes: int, types: list[str], tiny_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """After so many passes of types over windows. Figures are in the file before, from the first one on."""
    output, scored = text.with_name("out.html"), survey.score_of
    count = -2 * len(TYPES)  # the probe comes first

    def stopping(*arguments):
        nonlocal count
        if count == passes:
            assert list(read(output.with_suffix(".json"))["types"]) == TYPES[:1]
            raise KeyboardInterrupt
        count += 1
        return scored(*arguments)

    monkeypatch.setattr(survey, "score_of", stopping)
    assert cost.main(argv(tiny_path, text, "-o", str(output), "--minutes", "5")) == 130
    figures, page = result(output)
    assert (figures["complete"], figures["windows"], list(figures["types"])) == (False, 1, types)
    assert "This page is partial" in page
    said = capsys.readouterr().err
    assert str(output) in said
    assert "Traceback" not in said


def test_types_that_do_not_fit_the_model_are_left_out_of_the_default(tiny_path: Path, text: Path, capsys) -> None:
    config, _ = read_model(tiny_path)
    with types.more_types(None):
        kept = [one.label for one in types.choose_types(types.DEFAULT_TYPES, None, config)]
    assert "q8_0" not in kept
    assert {"f16", "quality", "balanced", "compact"} <= set(kept)
    assert "q8_0 is left out. Cache type q8_0 needs a head dimension" in capsys.readouterr().err


class FakeOurs:
    """An engine whose rates are known."""

    def __init__(self, *args: object) -> None:
        self.close = lambda: None

    def with_settings(self, settings: dict) -> FakeOurs:
        return self

    def prompt_rate(self, ids: list[int]) -> float:
        return 1000.0

    def rates(self, ids: list[int], steps: int) -> tuple[float, float]:
        return 1000.0, 100.0


def test_a_type_that_no_engine_has_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "Ours", FakeOurs)
    figures, seconds = Result({}), iter(range(100, 0, -1))
    with types.more_types(None):
        compared = [CacheType.read(name) for name in ("ring4", "q4_0:plain", "f16/kivi4+token")]
        measured = speeds.Speeds("model", compared, range(64), {}, lambda: next(seconds))
        assert [*measured.measure()]
    measured.add_to(figures)
    assert figures.figures("speed", "ring4")["generation"].value == 100
    for name in ("q4_0:plain", "f16/kivi4+token"):
        assert (
            figures.figures("speed", name)["generation"].failure
            == "the engine cannot load this type, so its speed is not measured"
        )


def test_a_codec_outside_of_the_package_is_measured(tiny_path: Path, text: Path, no_speed: None, capsys) -> None:
    """Beside the types of --types, by its name, which is known to this run alone."""
    Path("mine.py").write_text(MINE)
    words = argv(tiny_path, text, "-o", "out.html", "--windows", "1")
    assert cost.main([*words, "--codec", "mine.py", "--types", "mine3,ring3"]) == 0
    figures, _ = result(Path("out.html"))
    mine, ring = ({name: row.value for name, row in figures.figures("text", who).items()} for who in ("mine3", "ring3"))
    assert mine == ring
    assert "mine3" not in codecs.available()
    assert "A single window has no ±: give more --windows." in capsys.readouterr().out


def test_given_windows_are_scored_however_long_they_take(
    tiny_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else is measured; with every token coded, each type has a second row, which costs more."""
    clock, output = Clock(), text.with_name("out.html")
    timed(monkeypatch, clock, 1.0)
    words = [*argv(tiny_path, text, "-o", str(output), "--minutes", "0.1"), "--windows", "1", "--window", "150"]
    words.append("--every-token-coded")
    cache_cost.measure(cost.read_options(words), words, clock)
    figures, page = result(output)
    assert (figures["windows"], figures["window"], figures["complete"]) == (1, 150, True)
    assert list(figures["types"]) == [name + scoring for name in TYPES for scoring in ("", ", every token coded")]
    assert kl(figures, "ring3") < kl(figures, "ring3, every token coded")
    assert not [*figures.parts("speed")]
    assert not re.search("<th[^>]*>(prompt|generation)", page), "no columns of what was not measured"


def test_each_of_several_texts_has_figures(tiny_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their windows take turns, and those of all are figures of the whole."""
    Path("code.py").write_text("for hill in inn:\n    north(rain, hill)\n" * 40, encoding="utf-8")
    flags = ("--windows", "3", "--window", "64", "-o", "out.html")
    assert cost.main(argv(tiny_path, "text.txt,code.py", *flags)) == 0
    figures, page = result(Path("out.html"))
    texts = {subject: figures.figures(subject, "ring3")["kl_mean"].runs for subject, *_ in figures.parts(prefix="kind")}
    assert {subject: len(runs) for subject, runs in texts.items()} == {"kind text.txt": 2, "kind code.py": 1}
    (first, last), (middle,) = texts["kind text.txt"], texts["kind code.py"]
    assert figures.figures("text", "ring3")["kl_mean"].runs == (first, middle, last)
    assert "By text" in page
    assert "KL mean by text" in capsys.readouterr().out
    assert figures["text"] == "text.txt, code.py"
    assert cost.main(argv(tiny_path, "text.txt,./text.txt", *flags)) == 2
    assert "two texts are called text.txt" in capsys.readouterr().err


def test_an_ablation_has_a_row_for_each_part(tiny_path: Path) -> None:
    """Means of 16 bits a channel instead of 8, in blocks of 64 tokens, add 8 / 64 bits to each value of keys."""
    config, _ = read_model(tiny_path)
    whole, *others, bare = types.choose_types(types.DEFAULT_TYPES, "ring4", config)
    assert [one.label for one in types.choose_types("f16", "ring4", config)][:2] == ["f16", whole.label]
    parts = [part.name for part in fields(Encoding)]
    assert [one.encoding for one in others] == [replace(Encoding(), **{part: False}) for part in parts]
    assert bare.encoding == Encoding(**dict.fromkeys(parts, False))
    (large_means,) = [one for one in others if one.label == "ring4 without small means"]
    scores = survey.Survey(str(tiny_path), [whole, large_means, bare], 256, NumpyOps(1), lambda sentence: None)
    list(scores.score([*range(5, 85)] * 2))
    figures = Result({})
    scores.add_to(figures)
    scores.close()
    bits = [figures.value("text", one.label, "bits_per_value") for one in (whole, large_means)]
    assert bits[1] > bits[0]
    assert len({kl(figures, one.label) for one in (whole, large_means, bare)}) == 3
