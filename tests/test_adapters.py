"""Adapters (LoRA): requests compute what a model with changed weights computes, and share K/V with no others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Engine, EngineError, PromptOptions, SamplingParams
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.chat.console import Console
from polarlm.engine.chat.session import ChatSession
from polarlm.engine.loading import need
from polarlm.engine.loading.checks import settle
from polarlm.engine.outputs import Completion
from polarlm.engine.requests.request import Preparation, Submission
from polarlm.engine.requests.scheduler import Scheduler
from polarlm.engine.state.prefix import join_salt, salt_adapter
from tests.adapters import ALL, changed_model, random_changes, write_peft
from tests.tiny import assert_idle, load_tiny, make_model

SETTINGS: dict[str, Any] = {"device": "cpu", "block_size": 8, "cache_type": "f16", "calibration": False}
_MANY = 20  # tokens of answers, so that all of a batch run at the same time
PROMPT = [5 + 7 * i % 90 for i in range(41)]
# Name → rank, modules that are changed, lora_alpha, and use_rslora.
ADAPTERS: dict[str, tuple[int, tuple[str, ...], float, bool]] = {
    "one": (1, ALL, 2.0, False),
    "five": (5, ("q_proj", "v_proj"), 8.0, False),
    "sixteen": (16, ("o_proj", "down_proj", "up_proj"), 16.0, True),
    "large": (64, ALL, 32.0, False),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, Path]:
    found = {}
    for seed, (name, (rank, modules, alpha, is_root)) in enumerate(ADAPTERS.items()):
        changes = random_changes(base, rank, seed, modules)
        found[name] = write_peft(base / name, changes, alpha, use_rslora=is_root)
    return found


@pytest.fixture(scope="module")
def changed(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Engine]:
    """An engine of NumPy's, with the changes of an adapter in its weights, or of none for ""."""
    folder, engines = tmp_path_factory.mktemp("changed"), dict[str, Engine]()

    def of(name: str) -> Engine:
        if name not in engines:
            path = base
            if name:
                rank, modules, alpha, is_root = ADAPTERS[name]
                changes = random_changes(base, rank, [*ADAPTERS].index(name), modules)
                path = changed_model(folder / name, base, changes, alpha / (rank**0.5 if is_root else rank))
            engines[name] = load_tiny(path, ops=NumpyOps(), **SETTINGS)
        return engines[name]

    return of


BACKENDS = ["native", pytest.param("numpy", marks=pytest.mark.slow)]


def opened(base: Path, backend: str, lora: dict[str, str]) -> Engine:
    if backend == "native":
        pytest.importorskip("llvmlite")
    ops = NumpyOps() if backend == "numpy" else None
    engine = load_tiny(base, ops=ops, lora=lora, weight_type="f32", **SETTINGS)
    assert engine.status().backend == backend
    return engine


@pytest.fixture(scope="module", params=BACKENDS)
def engine(request: pytest.FixtureRequest, base: Path, adapters: dict[str, Path]) -> Iterator[Engine]:
    with opened(base, request.param, {name: str(path) for name, path in adapters.items()}) as made:
        yield made


@pytest.fixture(autouse=True)
def prompts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps never go before prompts, however long these take, so that requests run together."""
    monkeypatch.setattr(Scheduler, "_prefill_is_due", True)


def params(tokens: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=0, **more)


def answer(engine: Engine, lora: str, prompt: Sequence[int] = PROMPT, **options: Any) -> Completion:
    return engine.generate(prompt, params(prompt_logprobs=0), PromptOptions(lora=lora, **options))


def likelihoods(answer: Completion) -> np.ndarray:
    """The log-probabilities of the tokens of prompt and answer."""
    return np.array([one.logprob for one in (*answer.prompt_logprobs, *answer.logprobs)])


def assert_alike(found: Completion, wanted: Completion, reference: Engine) -> None:
    """Another order of additions changes float32, and in steps rounds a stored key or value to the next half: log-
    probabilities of the reference's answer move by less than where none is rounded, as in a prompt."""
    assert found.token_ids == wanted.token_ids
    ids = [*PROMPT, *wanted.token_ids]
    unrounded = likelihoods(answer(reference, "", ids))[: len(ids) - 1]
    differences = np.abs(likelihoods(found) - likelihoods(wanted))
    in_prompt = len(PROMPT) - 1
    assert differences[:in_prompt].max() < 1e-4
    assert differences[in_prompt:].max() < np.abs(unrounded - likelihoods(wanted)).max()


def together(engine: Engine, names: Sequence[str]) -> list[list[int]]:
    """The tokens of answers to requests with these adapters, which are computed in the same steps."""
    outboxes, most = [submitted(engine, name, 0) for name in names], 0
    while engine.work():
        most = max(most, engine.status().running)
    assert most == len(names)
    return [tokens_of(engine, outbox) for outbox in outboxes]


@pytest.mark.parametrize("name", ["", *ADAPTERS])
def test_an_adapter_computes_what_changed_weights_compute(
    engine: Engine, changed: Callable[[str], Engine], name: str
) -> None:
    wanted = answer(changed(name), "")
    assert_alike(answer(engine, name), wanted, changed(name))
    if name:
        others = likelihoods(answer(changed(""), "", [*PROMPT, *wanted.token_ids]))
        assert np.abs(others[: len(PROMPT) - 1] - likelihoods(wanted)[: len(PROMPT) - 1]).max() > 0.1


def test_rows_of_a_step_have_adapters_of_their_own(engine: Engine, changed: Callable[[str], Engine]) -> None:
    """Mixtures in several orders, twice each: recorded steps run again with other numbers in their tables."""
    wanted = {name: changed(name).generate(PROMPT, params(_MANY)).token_ids for name in ("", *ADAPTERS)}
    for names in (["", "one", "five", "", "large", "one"], ["large", "", "", "sixteen", "five", "five"], ["", "one"]):
        for _ in range(2):
            assert together(engine, names) == [list(wanted[name]) for name in names]
    assert_idle(engine)


def test_equal_prompts_with_other_adapters_share_no_kv(engine: Engine) -> None:
    prompt = [9, *PROMPT]
    for name in ("five", "", "one"):
        first = engine.generate(prompt, params(1), PromptOptions(lora=name))
        again = engine.generate(prompt, params(1), PromptOptions(lora=name))
        assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, len(prompt) - 1)
    strong = engine.generate(prompt, params(1), PromptOptions(lora="one", lora_scale=2.0))
    set_salt = engine.generate(prompt, params(1), PromptOptions(lora="one", cache_salt="mine"))
    assert strong.usage.cached_tokens == set_salt.usage.cached_tokens == 0


def test_a_scale_multiplies_what_an_adapter_adds(engine: Engine, base: Path, tmp_path: Path) -> None:
    rank, modules, alpha, _ = ADAPTERS["five"]
    model = changed_model(tmp_path / "half", base, random_changes(base, rank, 1, modules), alpha / rank / 2)
    with load_tiny(model, ops=NumpyOps(), **SETTINGS) as halved:
        assert_alike(answer(engine, "five", lora_scale=0.5), answer(halved, ""), halved)
    none = answer(engine, "five", lora_scale=0.0)
    np.testing.assert_array_equal(likelihoods(none), likelihoods(answer(engine, "")))


def test_a_session_of_an_adapter_is_found_by_its_requests_alone(
    engine: Engine, base: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    prompt = [11, *PROMPT]
    engine.generate(prompt, params(1), PromptOptions(lora="one"))
    saved = engine.save_session(tmp_path / "one", prompt=prompt, options=PromptOptions(lora="one"))
    assert saved == len(prompt)
    with pytest.raises(EngineError, match="nothing to save"):
        engine.save_session(tmp_path / "none", prompt=prompt)
    ops = NumpyOps() if engine.status().backend == "numpy" else None
    lora = {"other": str(adapters["five"]), "renamed": str(adapters["one"])}
    with load_tiny(base, ops=ops, lora=lora, **SETTINGS) as other:
        assert other.load_session(tmp_path / "one").token_ids == tuple(prompt)
        for name, cached in (("", 0), ("other", 0), ("renamed", len(prompt) - 1)):
            assert other.generate(prompt, params(1), PromptOptions(lora=name)).usage.cached_tokens == cached
    with (
        load_tiny(base, ops=ops, **SETTINGS) as none,
        pytest.raises(EngineError, match="adapter that this engine lacks"),
    ):
        none.load_session(tmp_path / "one")


def test_wrong_names_are_sentences(engine: Engine, base: Path) -> None:
    with pytest.raises(EngineError, match="lora is 'two', but there is no adapter of this name; there are one, five"):
        answer(engine, "two")
    for lora, sentence in (
        ({"a b": "x"}, "give the adapter a name of letters"),
        ({"x": ""}, "give the path of a folder"),
    ):
        with pytest.raises(EngineError, match=sentence):
            load_tiny(base, lora=lora, **SETTINGS)


@pytest.fixture(params=BACKENDS)
def bare(request: pytest.FixtureRequest, base: Path) -> Iterator[Engine]:
    """An engine that was loaded without adapters."""
    with opened(base, request.param, {}) as made:
        yield made


def submitted(engine: Engine, name: str, units: int) -> deque[Any]:
    """The outbox of a request with this adapter, which runs."""
    outbox: deque[Any] = deque()
    engine.submit(PROMPT, params(_MANY), PromptOptions(lora=name), into=outbox)
    for _ in range(units):
        engine.work()
    return outbox


def tokens_of(engine: Engine, outbox: deque[Any]) -> list[int]:
    while engine.work():
        pass
    assert outbox[-1].finish_reason == "length"
    return [token for chunk in outbox for token in chunk.token_ids]


def test_adapters_are_loaded_while_requests_run(
    bare: Engine, adapters: dict[str, Path], changed: Callable[[str], Engine]
) -> None:
    """Ranks grow, so matrices of earlier adapters are filled up anew, while their requests run."""
    wanted = {name: changed(name).generate(PROMPT, params(_MANY)).token_ids for name in ("", *ADAPTERS)}
    outboxes = {"": submitted(bare, "", 3)}
    for name, path in adapters.items():
        bare.load_adapter(name, path)
        outboxes[name] = submitted(bare, name, 3)
    assert bare.status().running == len(wanted)
    for name, outbox in outboxes.items():
        assert tokens_of(bare, outbox) == list(wanted[name]), name
    for name in ADAPTERS:
        assert_alike(answer(bare, name), answer(changed(name), ""), changed(name))


def test_an_adapter_that_is_unloaded_ends_its_requests_first(
    bare: Engine, adapters: dict[str, Path], changed: Callable[[str], Engine]
) -> None:
    size = bare._model.weights.bytes
    bare.load_adapter("five", adapters["five"])
    bare.load_adapter("one", adapters["one"])
    assert bare._model.weights.bytes > size
    running = {name: submitted(bare, name, 3) for name in ("five", "one")}
    bare.unload_adapter("five")
    assert [*bare.adapters.by_name] == ["one"]
    with pytest.raises(EngineError, match="lora is 'five', but there is no adapter of this name; there are one"):
        answer(bare, "five")
    with pytest.raises(EngineError, match="lora is 'five'"):
        bare.unload_adapter("five")
    bare.load_adapter("large", adapters["large"])  # not in the place of five, which is in use
    running["large"] = submitted(bare, "large", 3)
    for name, outbox in running.items():
        assert tokens_of(bare, outbox) == list(changed(name).generate(PROMPT, params(_MANY)).token_ids), name
    for name in ("one", "large"):
        bare.unload_adapter(name)
    assert bare._model.weights.bytes == size
    assert_alike(answer(bare, ""), answer(changed(""), ""), changed(""))
    assert_idle(bare)


def test_another_adapter_of_the_same_name_finds_no_blocks(
    bare: Engine, adapters: dict[str, Path], changed: Callable[[str], Engine]
) -> None:
    for path, cached in (("one", 0), ("five", 0), ("one", len(PROMPT) - 1)):
        bare.load_adapter("sql", adapters[path])
        usage = bare.generate(PROMPT, params(1), PromptOptions(lora="sql")).usage
        assert usage.cached_tokens == cached  # of the first one, too, whose numbers are the same
        assert_alike(answer(bare, "sql"), answer(changed(path), ""), changed(path))
        bare.unload_adapter("sql")


def test_an_adapter_is_chosen_when_the_request_is_queued(
    bare: Engine, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt is read without the engine's lock: its adapter may be unloaded or replaced meanwhile."""

    def replaced(by: str | None) -> Preparation:
        def replace_it(submission: Submission) -> Submission:
            bare.unload_adapter("sql")
            if by is not None:
                bare.load_adapter("sql", adapters[by])
            return submission

        return replace_it

    prepared = bare._preparations
    for by, sentence in ((None, "there is no adapter of this name"), ("five", "Another adapter was loaded as sql")):
        if "sql" not in bare.adapters.by_name:
            bare.load_adapter("sql", adapters["one"])
        monkeypatch.setattr(bare, "_preparations", [*prepared, replaced(by)])
        with pytest.raises(EngineError, match=sentence):
            answer(bare, "sql")
    assert not bare.status().waiting


def test_what_cannot_be_loaded_leaves_the_engine_as_it_was(
    bare: Engine, adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare.load_adapter("one", adapters["one"])
    for name, path, sentence in (
        ("one", adapters["five"], "The adapter one is loaded already"),
        ("a b", adapters["five"], "give the adapter a name of letters"),
        ("five", tmp_path / "missing", "does not exist"),
        ("five", f"{adapters['five']}:0", "a scale of 0"),
    ):
        with pytest.raises(EngineError, match=sentence):
            bare.load_adapter(name, path)
    monkeypatch.setattr(bare._model.ops, "free_memory", lambda: 1000)
    with pytest.raises(EngineError, match="no room for another adapter") as caught:
        bare.load_adapter("five", adapters["five"])
    assert caught.value.code == "out_of_memory"
    assert [*bare.adapters.by_name] == ["one"]
    assert answer(bare, "one").token_ids


def test_salts_of_different_pairs_are_different() -> None:
    texts = ["", "a", "\0", "\0a\0", "a\0b", "b"]
    pairs = [(salt, adapter) for salt in texts for adapter in ("", "a", "b 1.0")]
    assert len({join_salt(*pair) for pair in pairs}) == len(pairs)
    assert all(salt_adapter(join_salt(salt, adapter)) == adapter for salt, adapter in pairs)
    assert join_salt("mine", "") == "mine"


def test_the_memory_of_adapters_is_counted(base: Path, adapters: dict[str, Path]) -> None:
    lora = {"lora": {name: str(adapters[name]) for name in ("large", "five")}}
    needs = [need.need(settle(base, None, {**SETTINGS, **more})).bytes for more in ({}, lora)]
    with load_tiny(base, **SETTINGS) as plain, load_tiny(base, **lora, **SETTINGS) as engine:
        taken = engine._model.weights.bytes - plain._model.weights.bytes
    changes = random_changes(base, 64, 3)
    # Two adapters take as much as two of the larger one, and q, k and v together have the sum of their ranks.
    assert taken > 2 * 4 * sum(a.size + b.size for a, b in changes.values())
    assert taken < needs[1] - needs[0] < taken + 4 * 512 * 1024


def test_the_chat_takes_the_first_adapter(engine: Engine) -> None:
    session = ChatSession(engine, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True), Console())
    expected = engine.generate("the rain", session.params, PromptOptions(lora="one", parse_special=True))
    assert session.complete("the rain").token_ids == tuple(expected.token_ids)


def test_blocks_on_a_disk_are_found_with_the_same_adapter_alone(
    base: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    kept = {"cache_disk": "1M", "cache_disk_folder": str(tmp_path), **SETTINGS}
    with load_tiny(base, lora={"one": str(adapters["one"])}, **kept) as engine:
        engine.generate(PROMPT, params(1), PromptOptions(lora="one"))
        assert engine._tiers._writer.flush(10)
    with load_tiny(base, lora={"five": str(adapters["five"]), "same": str(adapters["one"])}, **kept) as engine:
        for name, found in (("", False), ("five", False), ("same", True)):
            answer = engine.generate(PROMPT, params(1), PromptOptions(lora=name))
            assert (answer.usage.cached_tokens > 0) == found


def test_the_digest_of_an_answer_has_the_numbers_of_its_adapter(base: Path, tmp_path: Path) -> None:
    """Also where another file of the same name gives the same token."""
    digests = []
    for seed in (0, 0, 1):
        file = write_peft(tmp_path / f"adapter{seed}", random_changes(base, 1, seed), 1e-6)
        with load_tiny(base, replayable=True, lora={"a": str(file)}) as engine:
            answer = engine.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=1), PromptOptions(lora="a"))
        digests.append((answer.token_ids, answer.usage.replay_digest))
    assert digests[0] == digests[1] != digests[2]
    assert digests[0][0] == digests[2][0]
