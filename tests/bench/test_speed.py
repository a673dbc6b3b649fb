"""The speed measurement: the order of runs, what counts of them, and honest failures. No test asserts a time."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from polarlm.bench import result
from polarlm.bench.result import Result, Row
from polarlm.bench.speed import __main__ as speed
from polarlm.bench.speed import compare, contestants, measure
from polarlm.bench.speed.child import Failed, OutOfTime
from polarlm.bench.speed.measure import ReadBuffer
from polarlm.engine.backends.numpy.ops import NumpyOps
from tests.random_model import TINY, random_model
from tests.tiny import make_model

PEER = "llama-cpp-python"
VALUES = 2 * len(TINY.layers) * TINY.attention.kv_heads * TINY.attention.head_dim  # numbers of a token in the cache
SMALL = ["--device", "cpu", "--prompt", "40,100", "--depth", "100", "--repeat", "2", "--threads", "1,2"]
# Ours and the peer's, in the order of the columns.
FOUR = ["--types", "balanced,f16", "--peer-types", "f16,q4_0"]
Rates = Callable[[str, int, str, int], float]


class Measured(NamedTuple):
    """What the command has written: the result, and its output."""

    file: Result
    out: str
    err: str

    def rates(self, subject: str) -> dict[str, Row]:
        """Contestant → its rate in a subject."""
        return {row.contestant: row for row in self.file.rows("tokens/s") if row.subject == subject}

    def lines(self, subject: str) -> list[list[str]]:
        """The cells of the lines of the tables that begin with `subject`."""
        found = [line for line in self.out.splitlines() if line.startswith(f"| {subject} ")]
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in found]


Measure = Callable[..., Measured]


@pytest.fixture
def measure_with(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Measure:
    """Runs the command with SMALL and more flags, which has to end with `status`."""
    monkeypatch.setattr(measure, "_REST_SECONDS", 0)
    monkeypatch.setattr(measure, "ReadBuffer", lambda: ReadBuffer(1 << 16))
    monkeypatch.setattr(ReadBuffer, "read_rate", lambda self, threads: 1e10)  # far more than the small models read
    model = random_model(tmp_path_factory.mktemp("random"))

    def run(*flags: str, status: int = 0) -> Measured:
        output = tmp_path / "out.json"
        assert speed.main(["--weights", str(model), "--output", str(output), *SMALL, *flags]) == status
        return Measured(result.read(output), *capsys.readouterr())

    return run


# -- stand-ins for the processes -----------------------------------------------------------------------------------


class Stand:
    """A child that computes nothing: its rates are what `rates` says of its label, threads, call and tokens."""

    pid = os.getpid()
    calls: list[tuple[str, int, str, int]]
    rates: Rates

    def __init__(self, module: str, python: str = sys.executable, end: float = math.inf) -> None:
        self._engine = "ours" if module == "polarlm.bench.speed.ours" else "peer"

    def close(self) -> None:
        pass

    def call(self, name: str, *arguments: Any) -> Any:
        first, *rest = json.loads(json.dumps(arguments)) or [1000]
        if name == "start":
            self._context, self._threads, cache = rest
            keys = cache if self._engine == "peer" else cache.get("cache_type_k") or cache["cache_type"]
            self._label = f"{self._engine} {keys}"
            return self._record("start", self._context)
        if name == "about":
            return {"version": "1.2.3", "built_with": "AVX2 = 1", "backend": "native", "loaded": "24 MiB"}
        if name in ("weight_bytes", "cache_bytes"):
            return 1000 * first
        if name == "together":
            assert len(first) * (len(first[0]) + rest[0]) <= self._context
            return {"first": 0.5, "seconds": 2.0, "steps": [len(first) / self._record(name, len(first))]}
        assert len(first) + sum(map(len, rest)) <= self._context
        return self._record("prompt" if name == "prompt_rate" else "steps", len(first))

    def _record(self, call: str, tokens: int) -> float:
        Stand.calls.append((self._label, self._threads, call, tokens))
        return Stand.rates(self._label, self._threads, call, tokens)


@pytest.fixture
def stands(monkeypatch: pytest.MonkeyPatch) -> type[Stand]:
    """Stand-ins for all contestants. Ours are twice as fast, and two threads are faster than one."""
    monkeypatch.setattr(contestants, "Child", Stand)
    monkeypatch.setattr(Stand, "calls", [], raising=False)
    usual = staticmethod(lambda label, threads, call, tokens: 100.0 * threads * (2 if "ours" in label else 1))
    monkeypatch.setattr(Stand, "rates", usual, raising=False)
    return Stand


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_whole_measurement_in_processes(measure_with: Measure, tmp_path: Path) -> None:
    """Slow: a dozen processes load a model with windows."""
    flags = ["--weights", str(make_model(tmp_path, "gpt_oss_mxfp4")), "--prompt", "40", "--depth", "40"]
    whole = measure_with(*flags, "--types", "f16", "--threads", "1", "--repeat", "1", "--peer-types", "none").file
    rates = {row.subject: row for row in whole.rows("tokens/s")}
    assert list(rates) == ["generation, depth ≤ 64", "prompt of 40", "generation at 40"]
    assert {len(row.runs) for row in rates.values()} == {1}
    assert [row.more["sequences"] for row in whole.rows("first")] == [1, 8, 16]
    memory = whole.figures("memory", "polarlm f16")
    assert memory["now"].more["tokens"] == 40
    assert 30 << 20 < memory["now"].value < 1 << 30
    assert whole["complete"] is True
    assert not any(row.failure for row in whole.rows())
    assert "generation at 40" in (tmp_path / "out.html").read_text(encoding="utf-8")


def test_runs_alternate_with_the_faster_number_of_threads(measure_with: Measure, stands: type[Stand]) -> None:
    measured = measure_with(*FOUR)
    calls = [call for call in stands.calls if call[2] != "start"]
    ours, theirs = ["ours balanced", "ours f16"], ["peer f16", "peer q4_0"]
    tried = [("ours balanced", 1, "steps", 8), ("ours balanced", 2, "steps", 8)]
    assert calls[:6] == 3 * tried, "in turn, one run before those that count, and two that do"
    in_a_row = [*((label, 2) for label in ours), *((label, threads) for label in theirs for threads in (2, 1))]
    last = [(label, 2) for label in [*ours, *theirs]]  # two runs with two threads agree, twice as fast as with one
    expected = [(*who, "steps", 8) for who in [*in_a_row, *in_a_row, *last]]
    expected += [(*who, "prompt", 40) for who in [*in_a_row, *in_a_row, *last]]
    expected += [(*who, "prompt", 100) for who in [*in_a_row, *last]]
    expected += [(*who, "steps", 100) for who in [*in_a_row, *last]]
    expected += 3 * [("ours balanced", 2, "together", count) for count in (1, 8, 16)]
    expected += [(label, 2, "steps", 100) for label in [*ours, *theirs]]
    assert calls[6:] == expected
    assert "polarlm, backend native: 24 MiB\nllama-cpp-python: 1.2.3 (AVX2 = 1)\n" in measured.out
    cells = ["400 ± 0 (2.00×)", "400 ± 0 (2.00×)", "200 ± 0", "200 ± 0"]
    assert measured.lines("prompt of 40") == [["prompt of 40", *cells]]
    assert measured.lines("generation at 100")[0] == ["generation at 100", *cells]
    together = {name: row.value for name, row in measured.file.figures("8 sequences", "polarlm balanced").items()}
    assert together == {"first": 0.5, "seconds": 2.0, "step": 8 / 400}
    assert measured.file["threads"]["chosen"] == {"polarlm": 2}


def test_what_does_not_fit_into_the_minutes_is_left_out(measure_with: Measure, stands: type[Stand]) -> None:
    """By the rate of steps: three times 56 take 17 seconds, three times 64 more than there are."""
    stands.rates = staticmethod(lambda label, threads, call, tokens: 10.0)
    flags = "--types", "balanced", "--peer-types", "none", "--minutes", "0.3", "--threads", "1"
    measured = measure_with(*flags)
    assert measured.rates("prompt of 100")
    assert not measured.rates("generation at 100")
    assert measured.file["complete"] is False
    for name in ("generation at 100", "sequences"):
        assert f"There was no time for {name}: give more --minutes" in measured.out


def test_a_peer_s_figure_counts_if_two_runs_agree(measure_with: Measure, stands: type[Stand]) -> None:
    """With two threads it is faster once; with one and a cache of q4_0 it never agrees with itself."""
    numbers = count()

    def rates(label: str, threads: int, call: str, tokens: int) -> float:
        if label == "peer f16":
            return 40.0 if threads == 1 else float(90 + 20 * (next(numbers) % 2))
        return 20.0 + 5 * (next(numbers) % 2) if label == "peer q4_0" else 60.0

    stands.rates = staticmethod(rates)
    measured = measure_with(*FOUR)
    f16, q4_0 = (measured.rates("prompt of 100")[f"{PEER} {cache}"] for cache in ("f16", "q4_0"))
    assert (f16.more["threads"], f16.value) == (1, 40.0)
    assert {*f16.more["tried"]["2"]} == {90.0, 110.0}, "what was left out is kept"
    assert q4_0.failure == "unstable"
    ((*_, shown),) = measured.lines("prompt of 100")
    assert shown in ("unstable: 20.0, 25.0", "unstable: 25.0, 20.0")
    err = measure_with(*FOUR, "--repeat", "1", status=2).err
    assert err.splitlines()[-1].startswith("error: --repeat 1: a peer's figure counts if two runs agree")


@pytest.mark.parametrize(
    ("threads", "why"), [("1,2", "slower with 2 threads than with 1"), ("2", "of the memory's bandwidth")]
)
def test_a_peer_that_lacked_a_core_gives_no_ratio(
    threads: str, why: str, measure_with: Measure, stands: type[Stand], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads wait for each other, and ours do not: what it shows is the other work of the machine."""
    stands.rates = staticmethod(lambda label, threads, call, tokens: 300.0 if "ours" in label else 200.0 / threads)
    monkeypatch.setattr(ReadBuffer, "read_rate", lambda self, threads: 3e9)
    measured = measure_with(*FOUR, "--threads", threads)
    assert any(why in row.more.get("starvation", "") for row in measured.file.rows("tokens/s"))
    assert "×)" not in measured.out
    assert "No ratios, since llama.cpp f16 lacked a core: " in measured.out


def test_the_time_ends_peers_too(measure_with: Measure, stands: type[Stand]) -> None:
    """What was measured before counts; what lacks is named."""
    calls = count()

    def rates(label: str, threads: int, call: str, tokens: int) -> float:
        if label == "ours f16" and next(calls) > 2:  # after its start, a run to warm up and one that counts
            raise OutOfTime
        if "peer" in label and call == "prompt":
            raise OutOfTime
        return 100.0

    stands.rates = staticmethod(rates)
    measured = measure_with(*FOUR, "--minutes", "5")
    assert measured.file["complete"] is False
    assert measured.rates("generation, depth ≤ 64")["polarlm f16"].runs == (100.0,)
    assert measured.rates("prompt of 40")[f"{PEER} f16"].failure == "its time was over"
    assert "There was no time for prompt of 40: give more --minutes" in measured.out


def test_the_ratio_is_to_the_strongest_peer_which_each_row_names(measure_with: Measure, stands: type[Stand]) -> None:
    """Ours lose where they are slower. A peer has the caches that it knows."""

    def rates(label: str, threads: int, call: str, tokens: int) -> float:
        return {"ours balanced": 90.0, "peer f16": 60.0}.get(label, 120.0 if call == "prompt" else 30.0)

    stands.rates = staticmethod(rates)
    several = ["--types", "balanced", "--peer-types", "f16,u8", "--peer", f"{PEER},openvino-genai=some/python"]
    measured = measure_with(*several)
    (behind,), (ahead, read) = measured.lines("prompt of 40"), measured.lines("generation at 100")
    assert (ahead[1], ahead[-1]) == ("90.0 ± 0.0 (1.50×)", "llama.cpp f16")
    assert (behind[1], behind[-1]) == ("90.0 ± 0.0 (**0.75×**)", "OpenVINO u8")
    assert len(read) == 3, "what OpenVINO does not say is not made up"
    assert "\n\nOpenVINO converts weights and does not say what to" in measured.out


def test_the_share_of_the_bandwidth_counts_weights_and_cache(
    measure_with: Measure, stands: type[Stand], monkeypatch: pytest.MonkeyPatch
) -> None:
    # With one thread and with two, before each context: the machine was busy first.
    rates = iter([1e8, 1e8, 1e9, 2e9])
    monkeypatch.setattr(ReadBuffer, "read_rate", lambda self, threads: next(rates))
    measured = measure_with(*FOUR)
    ours, _, f16, q4_0 = (
        {name: row.value for name, row in measured.file.figures("generation at 100", who).items()}
        for who in measured.rates("generation at 100")
    )
    assert (ours["weights"], ours["cache"]) == (1_000_000, 100_000)
    assert ours["bandwidth"] == pytest.approx(1.1e6 * 400 / 2e9)
    assert (f16["cache"], q4_0["cache"]) == (2 * 100 * VALUES, 100 * VALUES * 18 // 32)
    assert measured.lines("generation at 100")[1][1] == "1 + 0 MB, 22%", "of the fastest"


@pytest.mark.parametrize("failing", ["start", "prompt", "steps"])
def test_a_contestant_that_fails_is_a_line_in_the_table(
    failing: str, measure_with: Measure, stands: type[Stand]
) -> None:
    def rates(label: str, threads: int, call: str, tokens: int) -> float:
        if label == "ours f16" and call == failing:
            raise Failed("crashed (SIGSEGV)")
        return 100.0

    stands.rates = staticmethod(rates)
    measured = measure_with(*FOUR)
    assert measured.file["complete"] is True
    rows = list(measured.file.rows("tokens/s"))
    failed = [row.failure for row in rows if row.contestant == "polarlm f16"]
    first = failed.index("crashed (SIGSEGV)")
    assert failed[first:] == ["crashed (SIGSEGV)"] * (4 - first), "it is left out up to the end of the part"
    assert sum(row.value is not None for row in rows) == len(rows) - len(failed[first:])
    assert "| crashed (SIGSEGV) |" in measured.out
    failures = [figures["peak"].failure for _, _, figures in measured.file.parts("memory")]
    assert failures == ["", "" if failing == "prompt" else "crashed (SIGSEGV)", "", ""], "a part of its own"


def test_a_gpu_has_no_threads_and_no_peer_and_what_the_context_lacks_is_named(
    measure_with: Measure, stands: type[Stand], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gpu(NumpyOps):
        name = "Some GPU"

    monkeypatch.setattr("polarlm.engine.backends.select._cuda", lambda numbers: Gpu())
    monkeypatch.setattr(compare, "about_gpu", lambda: {"name": "Some GPU", "driver": "1.2"})
    measured = measure_with(*FOUR, "--device", "cuda", "--prompt", "40,500", "--depth", "100,600")
    assert measured.file["machine"]["gpu"] == {"name": "Some GPU", "driver": "1.2"}
    assert [peer["version_or_absence"] for peer in measured.file["peers"]] == ["on the CPU only"]
    assert {row.more["threads"] for row in measured.file.rows("tokens/s")} == {1}
    assert measured.out.endswith(
        "A prompt of 500 does not fit into the model's 512 tokens\n\n"
        "Generation at 600 is left out: the model's context has 512 tokens\n"
    )
