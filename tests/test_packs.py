"""Contexts that are computed once, and that requests begin with."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm import pack
from polarlm.engine import Engine, EngineError, PromptOptions
from polarlm.engine.loading import calibration
from polarlm.engine.storage import objects, packs
from polarlm.engine.storage.packs import PackedText
from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from tests.model_loaders.hub_server import Hub, Repository
from tests.random_model import random_model
from tests.tiny import GREEDY, assert_idle, forget, load_tiny

TEXTS = {"a.txt": "The first text has words. " * 3, "b.txt": "Another text has others. " * 2}
MEASURE = calibration.measure
QUESTION = [{"role": "user", "content": "Which words?"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (folder := tmp_path / "texts").mkdir()
    for name, text in {**TEXTS, ".hidden": "no"}.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def packed(tiny_path: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    file = tmp_path / "manual.pack"
    assert pack.main([str(folder), "-m", str(tiny_path), "-o", str(file), "-sys", "Be short.", "--device", "cpu"]) == 0
    assert str(file) in capsys.readouterr().out
    return file


@pytest.fixture
def engine(tiny_path: Path, packed: Path) -> Iterator[Engine]:
    with Engine.load(tiny_path, device="cpu", packs={"manual": str(packed)}) as engine:
        yield engine


def system(*more: str) -> str:
    return "\n\n".join(["Be short.", *(f"{name}:\n\n{text.strip()}" for name, text in TEXTS.items()), *more])


def test_an_answer_is_the_one_to_all_messages_together(engine: Engine, tiny_path: Path) -> None:
    """And the pack's tokens are not computed, but for those that its last block shares with what follows."""
    options, one = PromptOptions(pack="manual"), engine.packs["manual"]
    assert list(one.texts) == [PackedText.from_text(name, text) for name, text in TEXTS.items()]
    for own, whole in (
        (QUESTION, [{"role": "system", "content": system()}, *QUESTION]),
        (
            [{"role": "system", "content": "Now."}, *QUESTION],
            [{"role": "system", "content": system("Now.")}, *QUESTION],
        ),
    ):
        answer = engine.generate(own, GREEDY, options)
        assert engine.prompt_ids(own, options) == engine.prompt_ids(whole)
        assert answer.usage.cached_tokens >= 64
        assert not answer.warnings
        with Engine.load(tiny_path, device="cpu") as fresh:
            assert fresh.generate(whole, GREEDY).token_ids == answer.token_ids


def test_a_text_follows_the_tokens_of_a_pack(engine: Engine) -> None:
    ids = engine.packs["manual"].token_ids
    for prompt in ("more", [5, 6, 7]):
        own = engine.tokenize("more") if prompt == "more" else prompt
        assert engine.prompt_ids(prompt, PromptOptions(pack="manual"))[: len(ids)] == [*ids]
        assert engine.generate(prompt, GREEDY, PromptOptions(pack="manual")).usage.prompt_tokens >= len(ids) + len(own)


def test_an_engine_takes_the_scales_of_its_first_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On two machines, whose calibrations are off by a small share, as sums in another order are. Engines with one pack
    share tiers, too."""
    (folder := tmp_path / "model").mkdir()
    weights, prompt = random_model(folder), np.random.default_rng(0).integers(5, 250, 150).tolist()
    (text := tmp_path / "text").write_text("A text.")
    files, command = [tmp_path / "one.pack", tmp_path / "other.pack"], ["-m", str(weights), "--device", "cpu"]

    def use(machine: int) -> None:
        def off(*args: Any, **kwargs: Any) -> Any:
            one = MEASURE(*args, **kwargs)
            return replace(one, key_variance=one.key_variance * np.float32(1 + 1e-6 * machine))

        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / str(machine)))
        monkeypatch.setattr(calibration, "measure", off)

    for machine, file in enumerate(files):
        use(machine)
        assert pack.main([str(text), *command, "-o", str(file)]) == 0
    tier = {"device": "cpu", "ctx_size": 512, "kv_store": str(tmp_path / "tier")}
    found = []
    for machine in (0, 1):
        use(machine)
        said: list[str] = []
        with Engine.load(weights, packs={"one": str(files[0])}, verbose=said.append, **tier) as engine:
            found.append(engine.generate(prompt, GREEDY).usage.cached_tokens)
        assert any(str(files[0]) in sentence for sentence in said)
        with pytest.raises(EngineError, match="make a pack by polarlm pack --like"):
            Engine.load(weights, packs={"one": str(files[0]), "other": str(files[1])}, **tier)
    assert pack.main([str(text), *command, "--like", str(files[0]), "-o", str(files[1])]) == 0
    Engine.load(weights, packs={"one": str(files[0]), "other": str(files[1])}, **tier).close()
    with Engine.load(weights, **tier) as engine:
        found.append(engine.generate(prompt, GREEDY).usage.cached_tokens)
    assert (found[0], found[1] >= 64, found[2]) == (0, True, 0)


def test_a_pack_is_read_again_when_the_store_has_reused_its_blocks(tiny_path: Path, packed: Path) -> None:
    with Engine.load(tiny_path, device="cpu", packs={"manual": str(packed)}, kept_sequences=1) as engine:
        answers = []
        for _ in range(2):
            answers.append(engine.generate(QUESTION, GREEDY, PromptOptions(pack="manual")))
            engine.generate([7] * (engine.context - 20), GREEDY)
        assert answers[0].token_ids == answers[1].token_ids
        assert answers[0].usage.cached_tokens == answers[1].usage.cached_tokens > 0


def test_a_template_that_writes_something_else_first_is_told(engine: Engine) -> None:
    pack_ = engine.packs["manual"]
    engine.packs["manual"] = replace(pack_, messages=[{"role": "user", "content": "Hello"}])
    (warning,) = engine.generate(QUESTION, GREEDY, PromptOptions(pack="manual")).warnings
    assert "tokens of the pack manual are computed again" in warning


def test_what_cannot_be_is_refused(engine: Engine, tiny_path: Path, packed: Path, tmp_path: Path) -> None:
    for options, words in (
        ({"pack": "other"}, "there is no pack of this name; there are manual"),
        ({"pack": "manual", "cache_salt": "x"}, "computed without cache_salt"),
        ({"pack": "manual", "lora": "x"}, "computed without lora"),
    ):
        with pytest.raises(EngineError, match=words):
            engine.generate(QUESTION, GREEDY, PromptOptions(**options))
    engine.generate("Hello", GREEDY)
    engine.save_session(tmp_path / "session")
    for where, more, words in (
        (tmp_path / "session", {}, "is a session and no pack"),
        (tmp_path / "missing", {}, "cannot be read"),
        (packed, {"cache_type": "f16"}, "saved with the cache types"),
        (packed, {"ctx_size": len(engine.packs["manual"].token_ids)}, "raise ctx_size"),
    ):
        with pytest.raises(EngineError, match=words):
            load_tiny(tiny_path, device="cpu", packs={"p": str(where)}, **more)


def test_damage_is_told_by_its_block(tiny_path: Path, packed: Path) -> None:
    content = bytearray(packed.read_bytes())
    content[-100] ^= 1
    packed.write_bytes(content)
    with Engine.load(tiny_path, device="cpu", packs={"manual": str(packed)}) as engine:
        with pytest.raises(EngineError, match=r"damaged.*block"):
            engine.generate(QUESTION, GREEDY, PromptOptions(pack="manual"))
        engine.generate(QUESTION, GREEDY)


def test_only_allowed_packs_are_taken(tiny_path: Path, packed: Path, tmp_path: Path) -> None:
    allowed, digest = tmp_path / "allowed", hashlib.sha256(packed.read_bytes()).hexdigest()
    settings = {"device": "cpu", "packs": {"manual": str(packed)}, "allowed_packs": str(allowed)}
    with pytest.raises(EngineError, match="cannot be read"):
        Engine.load(tiny_path, **settings)
    allowed.write_text(f"{'0' * 64}  other.pack\n\n")
    with pytest.raises(EngineError, match=digest):
        Engine.load(tiny_path, **settings)
    with allowed.open("a") as file:
        file.write(f"{digest.upper()}  manual.pack\n")
    with Engine.load(tiny_path, **settings) as engine:
        assert engine.generate(QUESTION, GREEDY, PromptOptions(pack="manual")).usage.cached_tokens >= 64


def test_a_file_that_changes_is_not_read(engine: Engine, packed: Path) -> None:
    """What was allowed, and what the list of packs says, was another file."""
    content = packed.read_bytes()
    packed.unlink()
    for change in (lambda: None, lambda: packed.write_bytes(content)):
        change()
        with pytest.raises(EngineError, match=r"cannot be read any more|has changed"):
            engine.generate(QUESTION, GREEDY, PromptOptions(pack="manual"))
    assert engine.generate(QUESTION, GREEDY).token_ids


def test_a_pack_of_the_hub(hub: Hub, tiny_path: Path, packed: Path) -> None:
    hub.repositories["user/manual"] = Repository({"manual.pack": packed.read_bytes(), "README.md": b""})
    hub.repositories["user/none"] = Repository({"README.md": b""})
    with Engine.load(tiny_path, device="cpu", packs={"manual": "hf:user/manual"}) as engine:
        assert engine.generate(QUESTION, GREEDY, PromptOptions(pack="manual")).usage.cached_tokens >= 64
    with pytest.raises(EngineError, match=r"should have one \.pack file, and has none"):
        Engine.load(tiny_path, device="cpu", packs={"none": "hf:user/none"})


WRONG = [None, -1, 2**70, 1.5, "", "x", [], {}, True, [[1]], {"a": None}, 10**400, [None] * 5, float("nan"), "\ud800"]


def damaged(content: bytes, chance: random.Random) -> bytes:
    """A file with right checksums that somebody has made wrong."""
    kind, parts, at = chance.randrange(2, 6), [], 0
    while at < len(content):
        name = objects.read_name(content[at:])
        size, _ = objects._sizes(name, content[at : at + objects._START])
        parts.append((name, content[at : at + size]))
        at += size
    if kind == 2:
        chance.shuffle(parts) if chance.random() < 0.5 else parts.pop(chance.randrange(len(parts)))
        return b"".join(part for _, part in parts)
    number = 0 if kind < 5 else chance.randrange(len(parts))
    name, part = parts[number]
    one = objects.unpack(name, part, len(part))
    header, payload = dict(one.header), np.array(one.payload)
    place: Any = header
    if kind == 3 and isinstance(header["note"], dict):
        place = header["note"] = json.loads(json.dumps(header["note"]))
        place = place[next(iter(place))] if chance.random() < 0.8 else place
    if kind == 4 or number:
        payload = np.frombuffer(chance.randbytes(chance.choice([0, len(payload), len(payload) + 4])), np.uint8)
    if kind != 4 or chance.random() < 0.5:
        place[chance.choice([*place])] = chance.choice(WRONG)
    parts[number] = name, b"".join(objects.Object(header, payload).pack(name))
    return b"".join(part for _, part in parts)


@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.slow if n else []) for n in range(6)])
def test_damaged_and_hostile_files_end_no_engine(tiny_path: Path, packed: Path, seed: int) -> None:
    """300 of them: a sentence, or an answer."""
    chance, content, sentences = random.Random(seed), packed.read_bytes(), list[str]()
    with Engine.load(tiny_path, device="cpu", packs={"manual": str(packed)}) as engine:
        alone = engine.generate(QUESTION, GREEDY)
        for _ in range(50):
            packed.write_bytes(damaged(content, chance))
            vocabulary = engine.model.vocabulary
            try:
                engine.packs = packs.open_packs(engine.config, engine._identity, vocabulary, engine.context)
                forget(engine)
                assert len(engine.generate(QUESTION, GREEDY, PromptOptions(pack="manual")).token_ids) == 12
            except EngineError as error:
                sentences.append(str(error))
        assert len(sentences) > 30
        assert all("\n" not in one and "manual" in one for one in sentences)
        assert engine.generate(QUESTION, GREEDY).token_ids == alone.token_ids
        assert_idle(engine)


def test_a_conversation_is_packed_as_it_is(tmp_path: Path) -> None:
    conversation = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    (tmp_path / "talk.json").write_text(json.dumps(conversation))
    messages, (text,) = pack.read_messages([str(tmp_path / "talk.json")], "Be short.")
    assert messages == [{"role": "system", "content": "Be short."}, *conversation]
    assert text.name == "talk.json"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["a.txt"], "-o"),
        (["missing.txt", "-o", "x"], "missing.txt cannot be read"),
        (["-o", "x"], "TEXT is missing"),
        (["nothing.txt", "-o", "x"], "nothing to pack"),
        (["empty", "-o", "x"], "no file in this folder"),
        (["bytes.txt", "-o", "x"], "not UTF-8"),
        (["talk.json", "a.txt", "-o", "x"], "packed alone"),
        (["wrong.json", "-o", "x"], "a conversation is a list of messages"),
    ],
)
def test_what_cannot_be_packed(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("A text.")
    (tmp_path / "nothing.txt").write_text(" ")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xfd")
    (tmp_path / "talk.json").write_text('[{"role": "user", "content": "Hello"}]')
    (tmp_path / "wrong.json").write_text('["Hello"]')
    assert pack.main(words) == 2
    assert sentence in capsys.readouterr().err
