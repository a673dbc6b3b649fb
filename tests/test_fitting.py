"""How layers store K/V is computed at a model's first start, and read at later ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from polarlm.engine import Engine, SamplingParams
from polarlm.engine.loading import assembly, encoding, fitting, kept_arrays
from polarlm.engine.loading.encoding import LayerEncodings
from polarlm.engine.loading.kept_arrays import digest_key, read, write
from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from tests.tiny import VOCABULARY, make_model

PROMPT = list(range(5, 25))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


FITTED: list[LayerEncodings] = []


@pytest.fixture(autouse=True)
def _fitted_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """FITTED gets what every start finds or computes."""

    def load_or_fit(*args, **kwargs):
        FITTED.append(fitting.load_or_fit(*args, **kwargs))
        return FITTED[-1]

    monkeypatch.setattr(assembly, "load_or_fit", load_or_fit)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that gets the name of every function that computes something of a layer's size."""
    calls: list[str] = []

    def counted(name: str) -> Callable:
        function = getattr(fitting, name)

        def count(*args, **kwargs):
            calls.append(name)
            return function(*args, **kwargs)

        return count

    for name in ("load_or_calibrate", "variances", "encode_layers"):
        monkeypatch.setattr(fitting, name, counted(name))
    return calls


def start(path: Path, said: list[str] | None = None, **settings) -> tuple[LayerEncodings, tuple[int, ...]]:
    """Conditioning and metrics of an engine, and the ids of an answer."""
    verbose = None if said is None else said.append
    settings = {"device": "cpu", "block_size": 8, "ctx_size": 64, **settings}
    with Engine.load(path, verbose=verbose, **settings) as engine:
        answer = engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        return FITTED[-1], tuple(answer.token_ids)


def assert_same(a: LayerEncodings, b: LayerEncodings) -> None:
    for one, other in zip(a[0], b[0], strict=True):
        for name in ("keys", "values"):
            np.testing.assert_array_equal(getattr(one.scale, name), getattr(other.scale, name), strict=True)
        for name in ("key_rotation", "value_rotation"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    for metrics, others in zip(a[1], b[1], strict=True):
        for metric, other in zip(metrics, others, strict=True):
            assert (metric is None) == (other is None)
            for name in () if metric is None else vars(metric):
                np.testing.assert_array_equal(getattr(metric, name), getattr(other, name))


def test_later_starts_read_what_the_first_of_the_same_settings_has_computed(
    tiny_path: Path, computed: list[str]
) -> None:
    """Otherwise codes would be made with the scales and metrics of another cache type."""
    settings: list[dict] = [{}, {"cache_type": "compact"}, {"block_size": 4}]
    firsts = [start(tiny_path, **one) for one in settings]
    assert computed.count("encode_layers") == len(settings)
    computed.clear()
    for one, (stored, answer) in zip(settings, firsts, strict=True):
        again, ids = start(tiny_path, **one)
        assert_same(stored, again)
        assert ids == answer
    assert not computed


@pytest.mark.parametrize("settings", [{"calibration": False}, {"cache_type": "f16"}], ids=str)
def test_without_a_calibration_nothing_is_kept(tiny_path: Path, cache: Path, settings: dict) -> None:
    start(tiny_path, **settings)
    assert not list(cache.glob("encoding-*"))


def test_a_folder_that_cannot_be_written_is_told_once(tiny_path: Path, cache: Path) -> None:
    cache.write_text("a file is in the way")
    said: list[str] = []
    start(tiny_path, said)
    (sentence,) = [sentence for sentence in said if "cannot be kept" in sentence]
    assert f"set {CACHE_VARIABLE} to a folder that can be written" in sentence


# -- files -----------------------------------------------------------------------------------------------------------


def test_the_files_used_least_recently_are_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_arrays, "_LIMIT_BYTES", 500)  # of three files
    keys = [digest_key(number) for number in range(4)]
    said: list[str] = []
    for age, key in enumerate(keys[:3]):
        write("some", key, {"a": np.ones((2, 3), np.float32)}, said.append)
        (file,) = cache.glob(f"some-{key}")
        os.utime(file, (1000 + age, 1000 + age))
    (cache / "some-notes.txt").write_text("not of this program")
    assert read("some", keys[0]) is not None  # it is the one used last now
    write("some", keys[3], {}, said.append)
    assert [read("some", key) is not None for key in keys] == [True, False, True, True]
    assert (cache / "some-notes.txt").exists()
    assert not said


def test_errors_of_latent_vectors_cost_as_keys_and_as_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By KL to full precision: codes that are chosen by what errors of keys cost alone are worse."""
    path, ids = make_model(tmp_path, "glm4_moe_lite"), np.random.default_rng(0).integers(5, VOCABULARY, 250).tolist()

    def logits(cache_type: str) -> np.ndarray:
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / f"cache {len(FITTED)}"))
        with Engine.load(path, device="cpu", ctx_size=256, block_size=32, cache_type=cache_type) as engine:
            found = engine.score(ids, logits=True, every_token_coded=True).logits
        return found.astype(np.float64)

    exact, both = logits("f16"), logits("ring3")
    monkeypatch.setattr(encoding, "_scaled_second", lambda second, other: 0)
    keys_alone = logits("ring3")
    chances = np.exp(exact) / np.exp(exact).sum(axis=1, keepdims=True)

    def median_kl(other: np.ndarray) -> float:
        shift = exact - other
        normed = shift - np.log(np.exp(exact).sum(axis=1) / np.exp(other).sum(axis=1))[:, None]
        return float(np.median((chances * normed).sum(axis=1)))

    assert 0 < median_kl(both) < 0.75 * median_kl(keys_alone)
