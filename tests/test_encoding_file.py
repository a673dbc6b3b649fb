"""Encodings as files: machines whose calibrations differ share what they store."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polarlm import fit
from polarlm.engine import Engine, EngineError, PromptOptions, SamplingParams
from polarlm.engine.loading import calibration, encoding_file
from polarlm.engine.storage.packs import note_of
from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from tests.random_model import random_model
from tests.server.http_server import serving

PROMPT = np.random.default_rng(0).integers(5, 250, 150).tolist()
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A model in a folder of its own."""
    (folder := tmp_path / "model").mkdir()
    return random_model(folder)


class Machine:
    """A cache folder of its own, and calibrations that are off by a small share, as sums in another order are."""

    def __init__(self, folder: Path, off: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._off, self._patch = folder, off, monkeypatch

    def use(self) -> None:
        def off(*args, **kwargs):
            one = MEASURE(*args, **kwargs)
            return replace(one, key_variance=one.key_variance * np.float32(1 + self._off))

        self._patch.setenv(CACHE_VARIABLE, str(self._folder))
        self._patch.setattr(calibration, "measure", off)

    def load(self, weights: Path, said: list[str] | None = None, **more) -> Engine:
        self.use()
        return Engine.load(weights, device="cpu", ctx_size=512, verbose=None if said is None else said.append, **more)


MEASURE = calibration.measure


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Machine, Machine]:
    return Machine(tmp_path / "one", 0, monkeypatch), Machine(tmp_path / "other", 1e-6, monkeypatch)


@pytest.fixture
def written(machines: tuple[Machine, Machine], weights: Path, tmp_path: Path) -> Path:
    """The encoding of the first machine."""
    file = tmp_path / "shared.encoding"
    machines[0].use()
    assert fit.main(["--write", "--device", "cpu", str(weights), "--output", str(file)]) == 0
    return file


def test_machines_with_one_encoding_share_sessions(
    machines: tuple[Machine, Machine], weights: Path, written: Path, tmp_path: Path
) -> None:
    one, other = machines
    with one.load(weights, encoding=str(written)) as engine:
        answer = engine.generate(PROMPT, GREEDY).token_ids
        engine.save_session(tmp_path / "session")
        more = engine.generate([*PROMPT, *answer, 7], GREEDY).token_ids
    with one.load(weights) as engine:  # the machine's own is the same
        engine.load_session(tmp_path / "session")
    with other.load(weights) as engine, pytest.raises(EngineError, match="load the engine with this file as encoding"):
        engine.load_session(tmp_path / "session")
    for encoding in (written, tmp_path / "session"):  # a session has what it takes to read it
        with other.load(weights, encoding=str(encoding)) as engine:
            engine.load_session(tmp_path / "session")
            completion = engine.generate([*PROMPT, *answer, 7], GREEDY)
            assert completion.usage.cached_tokens == len(PROMPT) + len(answer) - 1
            assert completion.token_ids == more


def test_an_engine_takes_the_encoding_of_its_first_pack(
    machines: tuple[Machine, Machine], weights: Path, tmp_path: Path
) -> None:
    files = [tmp_path / "one.pack", tmp_path / "other.pack"]
    for machine, file in zip(machines, files, strict=True):
        with machine.load(weights) as engine:
            engine.generate(PROMPT, GREEDY)
            engine.save_session(file, prompt=PROMPT, note=note_of([{"role": "system", "content": "a"}], []))
    for machine in machines:
        said: list[str] = []
        with machine.load(weights, said, packs={"one": str(files[0])}) as engine:
            assert engine.generate([8, 9], GREEDY, PromptOptions(pack="one")).usage.cached_tokens == len(PROMPT)
        assert any(str(files[0]) in sentence for sentence in said)
        with pytest.raises(EngineError, match="such as one of its packs"):
            machine.load(weights, packs={"one": str(files[0]), "other": str(files[1])})
    assert files[0].read_bytes() != files[1].read_bytes()


@pytest.mark.parametrize("cache_type", ["balanced", "compact", "f16"])
def test_machines_with_one_encoding_share_tiers(
    machines: tuple[Machine, Machine], weights: Path, written: Path, tmp_path: Path, cache_type: str
) -> None:
    tier = {"cache_disk": "50M", "cache_disk_folder": str(tmp_path / "tier"), "cache_type": cache_type}
    found = []
    for machine, encoding in ((machines[0], written), (machines[1], written), (machines[1], None)):
        with machine.load(weights, encoding=encoding and str(encoding), **tier) as engine:
            found.append(engine.generate(PROMPT, replace(GREEDY, max_tokens=1)).usage.cached_tokens)
    assert found[0] == 0
    assert found[1] >= 64
    assert (found[2] == 0) == (cache_type != "f16")  # whose scales are powers of two, of the weights alone


def test_an_engine_takes_the_encoding_of_the_server_that_computes_its_prompts(
    machines: tuple[Machine, Machine], weights: Path
) -> None:
    one, other = machines
    said: list[str] = []
    with one.load(weights) as strong, serving(strong) as server, other.load(weights) as alone:
        assert alone._identity["conditioning"] != strong._identity["conditioning"]
        with other.load(weights, said, prefill_at=server.url) as weak:
            answer = weak.generate(PROMPT, GREEDY)
            assert answer.usage.cached_from == {"prefill-at": len(PROMPT) - 1}
            assert answer.token_ids == strong.generate(PROMPT, GREEDY).token_ids
    assert f"Keys and values are encoded as {server.url}/encoding says." in said


def test_an_encoding_comes_from_a_url(machines: tuple[Machine, Machine], weights: Path, written: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(written.parent))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        machines[1].load(weights, encoding=f"{url}/{written.name}").close()
        with pytest.raises(EngineError, match=r"cannot be read .HTTP Error 404"):
            machines[1].load(weights, encoding=f"{url}/another")
        with pytest.raises(EngineError, match="is not an encoding"):
            machines[1].load(weights, encoding=url)
        server.shutdown()
    with pytest.raises(EngineError, match=r"cannot be read .*refused"):
        machines[1].load(weights, encoding=f"{url}/{written.name}")


def test_the_file_beside_the_weights_is_found(machines: tuple[Machine, Machine], weights: Path, written: Path) -> None:
    said = [""]
    beside = encoding_file.place_beside(weights)
    beside.write_bytes(written.read_bytes())
    with machines[1].load(weights, said) as engine:
        digests = {conditioning.scale.keys.tobytes() for conditioning in engine._store.conditioning}
    assert any(str(beside) in sentence for sentence in said)
    with machines[0].load(weights, encoding=str(written)) as engine:
        assert digests == {conditioning.scale.keys.tobytes() for conditioning in engine._store.conditioning}
    said.clear()
    beside.write_bytes(b"something else")
    machines[1].load(weights, said).close()
    assert any(str(beside) in sentence and "fits its cache itself" in sentence for sentence in said)


def test_one_that_does_not_fit_is_refused(
    machines: tuple[Machine, Machine], weights: Path, written: Path, tmp_path: Path
) -> None:
    machine, other, missing, session = machines[0], *(tmp_path / name for name in ("other.gguf", "missing", "session"))
    with machine.load(weights) as engine:
        engine.generate(PROMPT, GREEDY)
        engine.save_session(session)
    other.write_bytes(weights.read_bytes()[:-1] + bytes([weights.read_bytes()[-1] ^ 1]))
    for path, more, words in (
        (weights, {"block_size": 32}, "blocks of 64 tokens, and here they have 32"),
        (weights, {"weight_type": "q4_0"}, "in another precision"),
        (other, {}, "other weights"),
        (weights, {"encoding": str(missing)}, "cannot be read"),
        (weights, {"encoding": str(tmp_path)}, "cannot be read"),
        (weights, {"calibration": False}, "leave it out"),
        (weights, {"encoding": str(session), "cache_type": "f16"}, "of other cache types"),
    ):
        with pytest.raises(EngineError, match=words):
            Engine.load(path, **{"device": "cpu", "ctx_size": 64, "encoding": str(written), **more})
    machine.load(weights, encoding=str(written)).close()


@given(st.integers(0, 10**6), st.integers(1, 255), st.booleans())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_is_told(loaded: tuple[Engine, bytes], tmp_path: Path, place: int, change: int, is_cut: bool) -> None:
    engine, content = loaded
    damaged = bytearray(content)
    place %= len(damaged)
    damaged[place] ^= change
    (tmp_path / "damaged").write_bytes(damaged[:place] if is_cut else damaged)
    model = engine._model
    with pytest.raises(EngineError, match="is not an encoding, or a damaged one"):
        encoding_file.load(tmp_path / "damaged", model.ops, model.config, model.weights, 64, {})


@pytest.fixture
def loaded(machines: tuple[Machine, Machine], weights: Path, written: Path) -> Iterator[tuple[Engine, bytes]]:
    with machines[0].load(weights) as engine:
        yield engine, written.read_bytes()


def test_numbers_that_no_calibration_gives_are_refused(loaded: tuple[Engine, bytes], tmp_path: Path) -> None:
    """In a file whose checksum is right."""
    model, content = loaded[0]._model, loaded[1]
    (tmp_path / "own").write_bytes(content)
    own = encoding_file.load(tmp_path / "own", model.ops, model.config, model.weights, 64, {})
    layer, _ = min(own.scales)
    for wrong in (np.nan, 0, -1):
        arrays = {**own.arrays, f"{layer} plain keys": np.full_like(own.scales[layer, False].keys, wrong)}
        changed = replace(own)
        changed.__dict__["arrays"] = arrays
        encoding_file.write(tmp_path / "wrong", changed)
        with pytest.raises(EngineError, match="damaged"):
            encoding_file.load(tmp_path / "wrong", model.ops, model.config, model.weights, 64, {})
    assert {field.name for field in fields(own)} == {"model", "name", "block_size", "statistics", "scales"}


def test_the_command_writes_it(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit.main(["--write", "--device", "cpu", str(weights)]) == 0
    beside = encoding_file.place_beside(weights)
    assert capsys.readouterr().out.startswith(f"{beside}: the encoding of random")
    said: list[str] = []
    Engine.load(weights, device="cpu", ctx_size=128, verbose=said.append).close()
    assert any(str(beside) in sentence for sentence in said)
    assert fit.main(["--write", "--device", "cpu", str(weights), "-o", str(tmp_path / "no" / "place")]) == 2
    assert "choose another place" in capsys.readouterr().err
    assert fit.main([str(weights), "-o", "file"]) == 2
    assert json.dumps("--write")[1:-1] in capsys.readouterr().err
