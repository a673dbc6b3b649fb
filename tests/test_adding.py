"""What docs/adding.md gives as complete is complete."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from polarlm.engine import Engine, SamplingParams, codecs, weight_formats
from polarlm.engine.weight_formats import Linear
from tests.bare import bare_model, prefill_logits, read_model, spread
from tests.codecs.test_contract import promises
from tests.conftest import FIXTURES
from tests.ops import attending
from tests.ops.backends import CUDA
from tests.ops.encoding import Shape, case_of, vectors
from tests.ops.test_encoding import one_sided
from tests.pairs import each
from tests.programs import ROOT, output_of
from tests.tiny import make_model
from tests.weights import StoredBytes

DOCUMENT = ROOT / "docs" / "adding.md"


def _example(path: str) -> str:
    """The text that the document gives for a file."""
    text = DOCUMENT.read_text(encoding="utf-8")
    example = re.search(r"^```python\n(.*?)^```", text[text.index(f"`{path}`") :], re.S | re.M)
    return example[1]


CODECS = ("int8", "hex3")


@pytest.fixture
def _in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The document's codecs, in their place."""
    for name in CODECS:
        (tmp_path / f"{name}.py").write_text(_example(f"engine/codecs/{name}.py"), encoding="utf-8")
    monkeypatch.setattr(codecs, "__path__", [*codecs.__path__, str(tmp_path)])
    codecs._modules.cache_clear()
    yield
    codecs._modules.cache_clear()
    for name in CODECS:
        sys.modules.pop(f"polarlm.engine.codecs.{name}", None)
        vars(codecs).pop(name, None)


def test_most_of_the_contract_can_be_asked_of_a_single_codec() -> None:
    assert len(promises()) > 5


@pytest.mark.usefixtures("_in_place")
@pytest.mark.parametrize(("name", "promise"), each(CODECS, promises()))
def test_a_codec_of_the_document_keeps_the_contract(name: str, promise: str) -> None:
    promises()[promise](name)


@pytest.mark.usefixtures("_in_place")
@pytest.mark.parametrize("name", CODECS)
def test_a_codec_of_the_document_is_a_cache_type(name: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with Engine.load(make_model(tmp_path / "model"), cache_type=name, device="cpu", block_size=16) as engine:
        answer = engine.generate([5] * 40, SamplingParams(max_tokens=8, ignore_eos=True))
        assert len(answer.token_ids) == 8
        assert name in engine.fit_line()


def test_an_engine_has_the_codec_of_a_module_of_one_s_own(tmp_path: Path) -> None:
    module = ModuleType("hex3")
    exec(compile(_example("engine/codecs/hex3.py"), "hex3.py", "exec", dont_inherit=True), vars(module))
    with codecs.more_types([module]), Engine.load(make_model(tmp_path), cache_type="hex3", device="cpu") as engine:
        assert "hex3" in engine.fit_line()
    assert "hex3" not in codecs.available()


@pytest.mark.usefixtures("_in_place")
def test_the_pairs_of_the_document_are_rounded_exactly_and_served_by_compiled_kernels() -> None:
    """A code is the nearest of all points in float64, and tiles hold NumPy's codes; only rounding is left to NumPy."""
    pytest.importorskip("llvmlite")
    from polarlm.engine.backends.native.ops import NativeOps

    codec = codecs.get("hex3")
    assert codecs.bits_per_value(codec, 64, 64) == 3 + 8 / 64
    pairs = np.random.default_rng(0).standard_normal((1000, 2)).astype(np.float32)
    points = codec.store.points.astype(np.float64)
    distances = np.linalg.norm(pairs[:, None] - points, axis=-1)
    assert points.shape == (64, 2)
    assert (np.diff(np.sort(distances)[:, :2]) > 1e-6).all()
    assert (codec.rounding.nearest(pairs)[0] == distances.argmin(-1)).all()
    case, why = case_of(NativeOps(1), Shape(("hex3", "hex3"), 64, 64, 8)), "no kernel rounds to the table of hex3"
    case.check_same()
    assert case.ops.numpy_fallbacks(case.cache) == {"the encoding of keys": why, "the encoding of values": why}


@pytest.mark.usefixtures("_in_place")
def test_a_gpu_has_kernels_for_the_pairs_of_the_document() -> None:
    """They encode as NumPy does, and attend, without a file of the codec's own."""
    for values in (False, True):
        shape = one_sided("hex3", values, 64, 16, heads=1)
        case_of(CUDA.open(), shape, vectors(np.random.default_rng(0), shape, 2)).check_same()
    step = attending.case_of(CUDA.open(), attending.Shape(("hex3", "hex3")), [attending.Sequence_(70)])
    step.check(step.attended())


@pytest.fixture
def _q1_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The document's weight format, in its place."""
    (tmp_path / "q1_0.py").write_text(_example("engine/weight_formats/q1_0.py"), encoding="utf-8")
    monkeypatch.setattr(weight_formats, "__path__", [*weight_formats.__path__, str(tmp_path)])
    weight_formats._formats.cache_clear()
    yield
    weight_formats._formats.cache_clear()
    sys.modules.pop("polarlm.engine.weight_formats.q1_0", None)
    vars(weight_formats).pop("q1_0", None)


@pytest.mark.usefixtures("_q1_0")
def test_the_weight_format_of_the_document_is_multiplied_in_place(rng: np.random.Generator) -> None:
    """Its bits are signs, and compiled kernels multiply it without a file of theirs."""
    pytest.importorskip("llvmlite")
    from polarlm.engine.backends.native.ops import NativeOps

    raw = rng.integers(0, 256, (32, 4, 18), np.uint8)
    scales = rng.uniform(0.01, 0.1, (32, 4, 1)).astype("<f2")
    raw[..., :2] = scales.view(np.uint8)
    bits = [
        [byte >> place & 1 for byte in block for place in range(8)] for block in raw[..., 2:].reshape(128, 16).tolist()
    ]
    values = np.where(np.array(bits).reshape(32, 4, 128), scales, -scales).astype(np.float32).reshape(32, 512)
    stored = StoredBytes(raw.reshape(32, -1), "q1_0")
    assert (stored.values == values).all()
    ops = NativeOps(1)
    weight = Linear(ops.load([stored]))
    for rows in (1, 3, 40):
        x = rng.standard_normal((rows, 512)).astype(np.float32)
        exact = x.astype(np.float64) @ values.T.astype(np.float64)
        assert np.abs(ops.linear(x, weight) - exact).max() <= 1e-4 * np.abs(exact).max()


def test_the_family_of_the_document_loads_and_computes(tmp_path: Path) -> None:
    """It is the repository's own. Qwen2 without windows computes the same, and calls its tensors alike."""
    folder = FIXTURES / "qwen2_bias"
    written = json.loads((folder / "config.json").read_text())
    written |= {"model_type": "seed_oss", "architectures": ["SeedOssForCausalLM"], "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(written))
    shutil.copy(folder / "model.safetensors", tmp_path)
    config, weights = read_model(tmp_path)
    assert (config.family, config.attention.qkv_bias, config.attention.out_bias) == ("seed_oss", True, False)
    reference = np.load(folder / "reference.npz")
    logits = prefill_logits(bare_model(config, weights), reference["ids"].tolist())
    assert np.abs(logits - reference["logits"]).max() <= 1e-3 * spread(reference["logits"])


def _files_of_sampler(copy: Path) -> list[str]:
    """The files that the document's sampling option touches, which are changed in a copy of the repository."""
    patch = re.search(r"^```diff\n--- (.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.S | re.M)[1]
    patches = [one.split("\n", 1) for one in patch.split("--- ")]
    for name, hunks in patches:
        for hunk in hunks.split("@@\n"):
            lines = hunk.splitlines()
            old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] in kept) for kept in (" -", " +"))
            text = (copy / name).read_text(encoding="utf-8")
            assert text.count(old) == 1, old
            (copy / name).write_text(text.replace(old, new), encoding="utf-8")
    return [name for name, _ in patches]


def test_the_sampling_option_of_the_document_passes_its_tests_and_touches_eight_files(tmp_path: Path) -> None:
    """It is drawn with on both devices, read from JSON and written into what `scripts.keywords` makes."""
    copy = tmp_path / "copy"
    others = shutil.ignore_patterns(".*", "__pycache__", "fixtures", "results")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=others)
    (copy / "tests/fixtures").symlink_to(ROOT / "tests/fixtures")
    files = _files_of_sampler(copy)
    assert len(files) <= 8
    run = partial(output_of, sys.executable, "-m", folder=copy, PYTHONPATH=str(copy))
    run("scripts.keywords")
    assert "logit_gap: float\n" in (copy / "engine/keywords.py").read_text(encoding="utf-8")
    run("pytest", "-n0", "-q", "-m", "not slow", *(name for name in files if name.startswith("tests/")))
    assert "--logit-gap X" in run("polarlm", "chat", "--help")
