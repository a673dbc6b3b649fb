"""`replayable`: an answer is the same to the bit beside any other requests, whatever is cached, and after a restart."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Completion, Engine, EngineError, PromptOptions, SamplingParams
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import Ops
from polarlm.engine.jit.compile import target
from polarlm.engine.jit.isa import VARIABLE as LEVEL
from polarlm.engine.outputs import fold
from tests.backends.native.test_arm_emulated import VARIABLE as ARM
from tests.model_loaders.test_elementary import FEATURES
from tests.programs import output_of
from tests.tiny import VOCABULARY, assert_idle, blocks_left, load_tiny, make_model

SETTINGS: dict[str, Any] = {"block_size": 32, "ctx_size": 256, "replayable": True}
ONE_KIND = "ring4/ring3.5"  # without recent blocks
FAMILIES = [
    "llama_gqa_linear",
    "gemma3_with_images",
    "qwen3_5_tied",
    "deepseek_v3_yarn",
    "gpt_oss_mxfp4",
    "nemotron_h_latent",
    "qwen2_moe_shared",
    "qwen3_vl_deepstack_tied",
    "gemma3_tied",
]


@dataclass(frozen=True)
class Case:
    """A request of which there are answers of many schedules. prompt: ids, or messages with images."""

    prompt: Any
    params: SamplingParams


def cases(rng: np.random.Generator, count: int, model: Path) -> list[Case]:
    """Requests, many of which begin alike; some say what they repeat, and some have images if the model reads them."""
    pictures = _pictures() if "vision_config" in (model / "config.json").read_text() else []
    stems = [tuple(rng.integers(5, VOCABULARY, int(rng.integers(1, 120))).tolist()) for _ in range(4)]
    found = []
    for _ in range(count):
        stem = stems[int(rng.integers(len(stems)))]
        tail = tuple(rng.integers(5, VOCABULARY, int(rng.integers(1, 60))).tolist())
        ids = (stem[: int(rng.integers(len(stem) + 1))] + tail) * int(rng.choice([1, 1, 2]))
        params = SamplingParams(
            temperature=float(rng.choice([0, 0.8, 1.5])),
            seed=int(rng.integers(1000)),
            max_tokens=int(rng.integers(1, 40)),
            logprobs=int(rng.integers(3)) if rng.random() < 0.5 else None,
            prompt_logprobs=0 if rng.random() < 0.1 else None,
            ignore_eos=True,
            spec_type=str(rng.choice(["none", "ngram-simple"])),
        )
        prompt: Any = ids[:200]
        if pictures and rng.random() < 0.3:
            parts = [
                {"type": "image", "image": pictures[int(one)]} for one in rng.integers(0, 3, int(rng.integers(1, 3)))
            ]
            prompt = [{"role": "user", "content": [*parts, {"type": "text", "text": "the rain"}]}]
            params = replace(params, prompt_logprobs=None)
        found.append(Case(prompt, params))
    return found


def _pictures() -> list[bytes]:
    from tests.images.test_models import picture  # which imports packages that an emulated machine lacks

    return [picture(seed) for seed in range(3)]


def content(answer: Completion) -> tuple[object, ...]:
    return answer.token_ids, answer.text, answer.logprobs, answer.prompt_logprobs, answer.finish_reason


def alone(engine: Engine, case: Case) -> tuple[object, ...]:
    """The answer of an engine that serves nobody else and finds nothing."""
    plain = replace(case.params, spec_type="none")
    return content(engine.generate(case.prompt, plain, PromptOptions(cache_prompt=False)))


def run_schedule(engine: Engine, rng: np.random.Generator, asked: Sequence[Case]) -> Iterator[tuple[int, Any]]:
    """Submit requests in any order and at any time, cancel some, leave little room, and yield the others' answers."""
    waiting, trays, cancelled = [*rng.permutation(len(asked))], dict[int, list[Any]](), set[int]()
    with ExitStack() as rooms:
        if rng.random() < 0.5:
            rooms.enter_context(blocks_left(engine, int(rng.integers(8, 24))))
        tickets = {}
        while waiting or engine.work():
            while waiting and rng.random() < 0.5:
                number = waiting.pop()
                options = PromptOptions(cache_prompt=bool(rng.random() < 0.8), priority=int(rng.integers(3)))
                trays[number] = []
                case = asked[number]
                tickets[number] = engine.submit(case.prompt, case.params, options, into=trays[number])
            if tickets and rng.random() < 0.02:
                number = int(rng.choice([*tickets]))
                tickets.pop(number).cancel()
                cancelled.add(number)
            engine.work()
    for number, tray in trays.items():
        if number not in cancelled:
            yield number, content(fold(tray))


def check_schedules(path: Path, kept: Path, seed: int, schedules: int, requests: int, **settings: Any) -> int:
    """Compare the answers of random schedules with those given alone, and return how many were compared."""
    rng, compared = np.random.default_rng(seed), 0
    asked = cases(rng, requests, path)
    with load_tiny(path, **SETTINGS, **settings) as engine:
        wanted = [alone(engine, case) for case in asked]
    for _ in range(schedules):
        more = {"parallel": int(rng.choice([1, 2, 5, 16])), "threads": int(rng.choice([1, 2, 3]))}
        if rng.random() < 0.5:  # a later engine begins with what earlier ones have kept
            more |= {"cache_disk": "64M", "cache_disk_folder": str(kept)}
        with load_tiny(path, **SETTINGS, **settings, **more) as engine:
            for _ in range(2):  # the second time, much is cached
                for number, found in run_schedule(engine, rng, asked):
                    assert found == wanted[number], f"request {number}, seed {seed}"
                    compared += 1
            assert_idle(engine)
    return compared


@pytest.mark.parametrize(("model", "cache_type"), [*zip(FAMILIES, ["compact", "balanced", ONE_KIND], strict=False)])
def test_answers_do_not_depend_on_schedules(tmp_path: Path, model: str, cache_type: str) -> None:
    assert check_schedules(make_model(tmp_path, model), tmp_path / "kept", 1, 1, 12, cache_type=cache_type) > 12


def test_a_prompt_of_a_hybrid_continues_inside_an_earlier_one(tmp_path: Path) -> None:
    """From a guessed place at first, then from the one where another prompt has left the first one."""
    path = make_model(tmp_path, "qwen3_5_tied")
    ids = np.random.default_rng(3).integers(5, VOCABULARY, (3, 200))
    ids[1:, :130] = ids[0, :130]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=1)
    asked = [Case(tuple(one.tolist()), params) for one in ids]
    for cache_type, found in ((ONE_KIND, [0, 64, 128]), ("compact", [0, 0, 0])):  # where all that is seen is exact
        with load_tiny(path, **SETTINGS, cache_type=cache_type) as engine:
            wanted = [alone(engine, case) for case in asked]
        with load_tiny(path, **SETTINGS, cache_type=cache_type) as engine:
            answers = [engine.generate(case.prompt, params) for case in asked]
        assert [content(answer) for answer in answers] == wanted
        assert [answer.usage.cached_tokens for answer in answers] == found


def test_a_conversation_goes_on_from_its_recent_blocks(tmp_path: Path) -> None:
    path, params = make_model(tmp_path, FAMILIES[0]), SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    ids = np.random.default_rng(3).integers(5, VOCABULARY, 130).tolist()
    with load_tiny(path, **SETTINGS, cache_type="compact") as engine:
        first = engine.generate(ids, params)
        more = Case((*ids, *first.token_ids, *ids[:9]), params)
        answer = engine.generate(more.prompt, params)
        assert answer.usage.cached_tokens == len(ids) + 39
        assert content(answer) == alone(engine, more)


def test_blocks_that_are_recent_in_a_shorter_prompt_alone_are_read_as_codes(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=1)
    ids = np.random.default_rng(3).integers(5, VOCABULARY, 200).tolist()
    with load_tiny(make_model(tmp_path, FAMILIES[0]), **SETTINGS, cache_type="balanced") as engine:
        first = engine.generate(ids, params)
        for count in (90, 125, 155, 185):
            engine.generate(ids[:count], params, PromptOptions(cache_prompt=False))
            again = engine.generate(ids, params)
            assert (again.usage.cached_tokens, content(again)) == (199, content(first))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "cache_type"), [*zip(FAMILIES, cycle(["balanced", ONE_KIND]), strict=False)])
def test_answers_do_not_depend_on_many_schedules(tmp_path: Path, model: str, cache_type: str) -> None:
    """REPLAYABLE_SCHEDULES says how many, of 64 requests each."""
    count = int(os.environ.get("REPLAYABLE_SCHEDULES", "4"))
    seed = int(np.random.default_rng().integers(1 << 31))
    print(f"seed {seed}")
    path = make_model(tmp_path, model)
    assert check_schedules(path, tmp_path / "kept", seed, count, 64, cache_type=cache_type) > 64


def digest(path: Path, *, with_prompts: bool, ops: Ops | None = None) -> str:
    """What stands for the answers to a few requests. with_prompts: and for log-probabilities of prompts."""
    asked = cases(np.random.default_rng(5), 6, path)
    if not with_prompts:
        asked = [replace(one, params=replace(one.params, prompt_logprobs=None)) for one in asked]
    with load_tiny(path, ops=ops, **SETTINGS) as engine:
        answers = [alone(engine, case) for case in asked]
        return hashlib.sha256(repr((engine.fingerprint.partition(":")[2], answers)).encode()).hexdigest()


def answers_elsewhere(python: str | Path, folder: Path, level: str, *flags: str) -> str:
    """The digest of another process's answers; NumPy has the instructions of its oldest CPUs."""
    variables = {LEVEL: level, "OPENBLAS_NUM_THREADS": "1", "NPY_DISABLE_CPU_FEATURES": FEATURES}
    return output_of(python, "-m", "tests.replay_digest", *flags, folder, **variables)


@pytest.mark.slow
@pytest.mark.parametrize("model", FAMILIES)
def test_answers_do_not_depend_on_the_level_of_the_cpu(tmp_path: Path, model: str) -> None:
    from tests.ops.backends import MATRICES  # which imports what an emulated machine lacks

    path = make_model(tmp_path, model)
    expected = digest(path, with_prompts=True)
    for level in target.levels()[1:]:
        assert answers_elsewhere(sys.executable, path, level.name) == f"{expected}\n"
    for backend in MATRICES:
        assert digest(path, with_prompts=True, ops=backend.open()) == expected


@pytest.mark.slow
@pytest.mark.parametrize("model", [FAMILIES[0], FAMILIES[2]])
def test_answers_do_not_depend_on_the_machine(tmp_path: Path, model: str) -> None:
    """Of AArch64, whose prompts attend in float32: log-probabilities of prompts are others there."""
    if not (folder := os.environ.get(ARM)):
        pytest.skip(f"{ARM} names no folder with an AArch64 Python, for which QEMU is needed")
    path = make_model(tmp_path, model)
    found = answers_elsewhere(Path(folder) / "python", path, "neon", "--no-prompts")
    assert found == f"{digest(path, with_prompts=False)}\n"


def test_what_cannot_be_replayed_is_refused(tiny_path: Path) -> None:
    for settings, why in [
        ({"device": "cuda"}, "device=cuda: replayable=True needs a CPU"),
        ({"input_bits": "bf16"}, "sums that are exact"),
        ({"cache_type": "polarquant"}, "polarquant has other factors"),
        ({"cache_type": "polarpair-m4n4+minmax/f16"}, "NumPy computes"),
        ({"ops": NumpyOps()}, "needs compiled kernels"),
    ]:
        with pytest.raises(EngineError, match=why):
            load_tiny(tiny_path, **SETTINGS | settings)


def test_sessions_of_others_are_not_read(tmp_path: Path) -> None:
    path = make_model(tmp_path, "gemma3_tied")
    with load_tiny(
        path, **SETTINGS | {"replayable": False, "cache_type": "ring4/ring3.5", "calibration": False}
    ) as one:
        one.generate([5, 6, 7], max_tokens=2)
        one.save_session(tmp_path / "session")
    with load_tiny(path, **SETTINGS) as engine, pytest.raises(EngineError, match="replayable"):
        engine.load_session(tmp_path / "session")


def test_no_salt_finds_a_prompt_that_was_computed_as_a_whole(tiny_path: Path) -> None:
    with load_tiny(tiny_path, **SETTINGS) as engine:
        engine.generate([*range(5, 95)], max_tokens=1, prompt_logprobs=0)
        for salt in ("", " read"):
            answer = engine.generate([*range(5, 95)], max_tokens=1, options=PromptOptions(cache_salt=salt))
            assert answer.usage.cached_tokens == 0


def test_requests_without_a_seed_have_the_same_one(tiny_path: Path) -> None:
    answers = set()
    for _ in range(2):
        with load_tiny(tiny_path, **SETTINGS) as engine:
            answers.add(engine.generate([5, 6, 7], temperature=1.5, max_tokens=20).token_ids)
    assert len(answers) == 1


def test_a_request_may_insist(tiny_path: Path) -> None:
    options = PromptOptions(replayable=True)
    for is_promised in (True, False):
        with load_tiny(tiny_path, **SETTINGS | {"replayable": is_promised}) as engine:
            if is_promised:
                assert engine.generate([5, 6], options=options, max_tokens=2).usage.replay_digest
            else:
                with pytest.raises(EngineError, match="Answers cannot be replayed here"):
                    engine.generate([5, 6], options=options, max_tokens=2)
