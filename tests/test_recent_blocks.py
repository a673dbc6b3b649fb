"""Presets: the newest blocks of a sequence are in full precision, older ones are codes."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Engine, EngineError, SamplingParams, codecs
from polarlm.engine.backends import transfer
from polarlm.engine.outputs import Completion
from polarlm.engine.quantization.encode import encode_centred
from polarlm.engine.sampling.sample import log_softmax
from polarlm.engine.state.cache_types import PRESETS
from polarlm.engine.state.kv_blocks import KVBlocks
from polarlm.engine.storage import objects, sessions
from polarlm.engine.storage.objects import Object
from polarlm.engine.storage.payloads import Payloads, join
from tests.conftest import TRAINED_HYBRID
from tests.pairs import mostly_slow
from tests.tiny import assert_idle, make_model

N = 16
MODELS = ["llama_gqa_linear", "gemma4_shared_kv", "qwen3_next_shared_keys"]  # also with windows, or recurrent layers
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, logprobs=2)
RECENT = PRESETS["balanced"].recent_blocks
TYPES = {name: "/".join(dict.fromkeys(preset[:2])) for name, preset in PRESETS.items()}


def load(path: Path, cache_type: str = "balanced", **settings: Any) -> Engine:
    common = {"device": "cpu", "block_size": N, "ctx_size": 256, "threads": 1}
    return Engine.load(path, cache_type=cache_type, **{**common, **settings})


def prompt(number: int, tokens: int = 120) -> list[int]:
    return np.random.default_rng(number).integers(5, 90, tokens).tolist()


def group(engine: Engine) -> KVBlocks:
    """The state of the layers that keep a whole text."""
    return next(one for one in engine._store.groups if isinstance(one, KVBlocks) and one.window is None)


def continued(engine: Engine, number: int, answer: Completion, more: int = 20) -> Completion:
    """The answer to a longer prompt, which begins with a prompt and its `answer`."""
    return engine.generate([*prompt(number), *answer.token_ids, *prompt(100 + number, more)], GREEDY)


@pytest.fixture(params=[pytest.param(MODELS[0], marks=pytest.mark.slow), *MODELS[1:]])
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    (folder := tmp_path / request.param).mkdir()
    return make_model(folder, request.param)


def test_drafts_are_verified_over_codes_and_recent_blocks(tiny_path: Path) -> None:
    """Rows together have other last bits."""
    with load(tiny_path) as plain, load(tiny_path, spec_type="ngram-simple") as drafted:
        ids = prompt(0, 8 * N)
        for _ in range(2):
            own, expected = (engine.generate(ids, GREEDY) for engine in (drafted, plain))
            assert own.token_ids == expected.token_ids
            assert own.usage.cached_tokens == expected.usage.cached_tokens
            ids = [*ids, *own.token_ids, *prompt(1, 20)]


def test_blocks_become_old_in_every_phase(path: Path) -> None:
    """Of a prompt, of steps, of several requests at a time, and of a conversation that goes on."""
    with load(path, parallel=3) as engine:
        trays: list[list[Any]] = [[] for _ in range(6)]
        for number, tray in enumerate(trays):
            engine.submit(prompt(number), replace(GREEDY, ignore_eos=True), into=tray)
        most = 0
        while engine.work():
            running = [one.kv.tables for one in engine._runner.requests.values() if one.kv is not None]
            counts = [len(table.recent) for tables in running for table in tables]
            assert max(counts, default=0) <= RECENT
            most = max(most, *counts, 0)
        assert most == RECENT
        assert {tray[-1].finish_reason for tray in trays} == {"length"}
        answer = engine.generate(prompt(7), GREEDY)
        usage = continued(engine, 7, answer).usage
        assert usage.cached_tokens > len(prompt(7))
        assert_idle(engine)


def test_with_too_few_slots_blocks_become_old_early_and_are_found_again(tiny_path: Path) -> None:
    """First those of conversations at rest, none of whose blocks is lost."""
    sizes: dict[str, Any] = {"parallel": 3, "kept_sequences": 3}
    with load(tiny_path, **sizes) as roomy:
        plan = replace(roomy._store.plan, recent_slots=0)
    sizes["kv_memory"] = str(5 * plan.bytes // 2)
    params = replace(GREEDY, max_tokens=20, ignore_eos=True)
    with load(tiny_path, **sizes) as engine:
        assert engine._store.plan.recent_slots < 3 * RECENT
        assert f"slots for {engine._store.plan.recent_slots} of {3 * RECENT} recent blocks" in engine.fit_line()
        answer = engine.generate(prompt(7, 70), params)
        trays: list[list[Any]] = [[] for _ in range(3)]
        for number, tray in enumerate(trays):
            engine.submit(prompt(number, 70), params, into=tray)
        while engine.work():
            pass
        assert {tray[-1].finish_reason for tray in trays} == {"length"}
        assert engine.generate([*prompt(7, 70), *answer.token_ids, 5], params).usage.cached_tokens >= 80
        assert_idle(engine)
    with pytest.raises(EngineError, match="recent tokens of all requests find no room in full precision; raise"):
        load(tiny_path, **sizes, replayable=True)


def test_a_session_has_recent_blocks_and_a_disk_has_their_codes(path: Path, tmp_path: Path) -> None:
    folder: dict[str, Any] = {"cache_disk": "100M", "cache_disk_folder": str(tmp_path / "blocks")}
    with load(path, **folder) as engine:
        answer = engine.generate(prompt(0), GREEDY)
        engine.save_session(tmp_path / "session")
    with load(path) as engine:
        assert engine.generate(prompt(0), GREEDY).token_ids == answer.token_ids
        expected = continued(engine, 0, answer)
    with load(path) as engine:
        engine.load_session(tmp_path / "session")
        own = continued(engine, 0, answer)
        assert (own.token_ids, own.logprobs) == (expected.token_ids, expected.logprobs)
    with load(path, **folder) as engine:
        assert continued(engine, 0, answer).usage.cached_from == {"disk": own.usage.cached_tokens}
        assert not any(table.recent for table in engine._prefixes.match_prefix(prompt(0)).tables)
    with load(path, "compact") as engine, pytest.raises(EngineError, match=r"with the cache types "):
        engine.load_session(tmp_path / "session")


def older(path: Path, shape: Any) -> None:
    """Rewrite a session as an earlier version saved it, with recent blocks as linear8."""
    linear8, payloads = codecs.get("linear8"), Payloads(shape)
    with path.open("rb") as file:
        first = objects.read(file, sessions.NAME)
        header = {**first.header, "cache_types": first.header["cache_types"] + " by-age:linear8"}
        ids, old, new = header["ids"], sessions._names(first.header), sessions._names(header)
        content = [*Object(header, first.payload).pack(sessions.NAME)]
        for number in range(-(-len(ids) // N)):
            block = objects.read(file, old(number))
            if block.is_full and 0 < number < len(ids) // N:
                as_codes = Payloads(shape.as_type("linear8"))
                header = {"kind": "block", "stored_as": transfer.FIELDS, "groups": block.groups}
                arrays: dict[tuple[int, str], np.ndarray] = {}
                for extent in payloads.extents(block):
                    x = extent.stack([block]).swapaxes(0, 1).astype(np.float32)
                    mean_bits = shape.layers[extent.layer].mean_bits * (extent.name == "k")
                    fields, mean = encode_centred(linear8, x, None, mean_bits)
                    for side, one in ((extent.name, fields), ("mean", mean)):
                        arrays |= {
                            (extent.layer, f"{side}.{name}"): array.swapaxes(0, 1) for name, array in one.items()
                        }
                (payload,) = join(*as_codes.quantized_extents(transfer.FIELDS, block.groups), arrays)
                block = Object({**header, "kind": "finer"}, payload)
            content += block.pack(new(number))
    path.write_bytes(b"".join(content))


def test_a_session_of_an_earlier_version_is_read(
    tiny_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "session"
    with load(tiny_path) as engine:
        answer = engine.generate(prompt(0), GREEDY)
        engine.save_session(file)
        expected, shape = continued(engine, 0, answer), engine.cache_shape
    older(file, shape)
    with load(tiny_path) as engine, caplog.at_level(logging.WARNING):
        engine.load_session(file)
        own = continued(engine, 0, answer)
        assert own.usage.cached_tokens == expected.usage.cached_tokens
        assert own.token_ids[:5] == expected.token_ids[:5]
    assert [record.message for record in caplog.records].count(
        f"{file} is of an earlier version: its newest blocks, of 8 bits, are kept in full precision"
    ) == 1


@mostly_slow("preset", PRESETS, ["balanced"])
def test_a_preset_is_nearer_to_full_precision_than_its_types_alone(preset: str) -> None:
    """A trained model, as long a text as its context; with every token coded, both cost the same."""
    text = (TRAINED_HYBRID / "held_out.txt").read_text(encoding="utf-8")
    kl, coded = {}, {}
    for cache_type in ("f16", preset, TYPES[preset]):
        with Engine.load(TRAINED_HYBRID, device="cpu", cache_type=cache_type, threads=1) as engine:
            ids = engine.tokenize(text)[: engine.context]
            own = log_softmax(engine.score(ids, logits=True).logits)
            exact = kl.setdefault("f16", own)
            if cache_type != "f16":
                kl[cache_type] = np.sum(np.exp(exact) * (exact - own), axis=1).mean()
                coded[cache_type] = engine.score(ids, every_token_coded=True).logprobs
    assert kl[preset] < 0.5 * kl[TYPES[preset]]
    np.testing.assert_allclose(*(scores.mean() for scores in coded.values()), rtol=1e-3)  # slots are half precision


def test_the_bits_of_a_text_are_those_of_its_blocks(tiny_path: Path) -> None:
    shapes = {}
    for cache_type in ("balanced", TYPES["balanced"]):
        with load(tiny_path, cache_type) as engine:
            shapes[cache_type] = engine.cache_shape
    own, codes = shapes["balanced"], shapes[TYPES["balanced"]]
    assert own.bits_of_text(5 * N) == 16  # without the first block
    assert own.bits_of_text(32 * N) == pytest.approx((RECENT * 16 + (31 - RECENT) * codes.bits_per_value) / 31)
    assert codes.bits_of_text(32 * N) == codes.bits_per_value
    layers = range(len(own.layers))
    more = RECENT * (own.full_bytes(layers) - own.quantized_bytes(layers))
    assert own.sequence_bytes(33 * N) == codes.sequence_bytes(33 * N) + more
