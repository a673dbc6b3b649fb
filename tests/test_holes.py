"""Messages that are left out: no later token sees their blocks, and nothing behind them is read again.

Against a forward pass in float64 with a mask: a row sees what is before it, without the holes there were when it was
read.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from polarlm.engine import Engine, EngineError, PromptOptions, SamplingParams
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from tests.cpu import CpuOps
from tests.cuda.emulated import open_device
from tests.tiny import CHARACTERS, load_tiny, make_model

BLOCK, HEADS, KV_HEADS, DIM, FACTOR = 16, 6, 2, 8, 4.0
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=20)
Message = dict[str, Any]


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight


def rotate(x: np.ndarray) -> np.ndarray:
    """x (T, heads, D)."""
    turns = np.arange(len(x))[:, None] / FACTOR * 10_000.0 ** (-np.arange(DIM // 2) / (DIM // 2))
    cos, sin = np.cos(turns)[:, None], np.sin(turns)[:, None]
    first, second = x[..., : DIM // 2], x[..., DIM // 2 :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def logprobs(path: Path, ids: list[int], mask: np.ndarray) -> np.ndarray:
    """The log-probabilities (T, V) of the token after each of `ids` (T,), whose rows see what `mask` (T, T) says."""
    w = {name: x.astype(np.float64) for name, x in load_file(path / "model.safetensors").items()}
    x = w["model.embed_tokens.weight"][ids]
    for number in range(2):
        at = f"model.layers.{number}."
        h = rms(x, w[at + "input_layernorm.weight"])
        q, k, v = (
            (h @ w[f"{at}self_attn.{name}_proj.weight"].T).reshape(len(ids), heads, DIM)
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        k, v = (np.repeat(each, HEADS // KV_HEADS, 1) for each in (rotate(k), v))
        scores = np.einsum("qhd,khd->hqk", rotate(q), k) / np.sqrt(DIM)
        weights = np.exp(np.where(mask, scores, -np.inf) - scores.max())
        out = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
        x = x + out.reshape(len(ids), -1) @ w[at + "self_attn.o_proj.weight"].T
        h = rms(x, w[at + "post_attention_layernorm.weight"])
        gate = h @ w[at + "mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[at + "mlp.up_proj.weight"].T)) @ w[at + "mlp.down_proj.weight"].T
    logits = rms(x, w["model.norm.weight"]) @ w["lm_head.weight"].T
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.fixture(params=["native", "numpy", pytest.param("cuda", marks=pytest.mark.slow)])
def engine(tiny_path: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    plain: dict[str, Any] = {"cache_type": "f16", "block_size": BLOCK, "calibration": False, "ctx_size": 256}
    ops = {"native": CpuOps, "numpy": NumpyOps, "cuda": lambda: CudaOps(open_device(checked=False))}[request.param]()
    with load_tiny(tiny_path, ops=ops, **plain) as engine:
        yield engine


def words(chance: random.Random, count: int) -> str:
    return "".join(chance.choice(CHARACTERS[:52]) for _ in range(count))


def holes_of(engine: Engine, messages: list[Message], ids: list[int]) -> set[int]:
    """The tokens of the blocks that lie wholly in a text that is left out."""
    text, found, holes = engine.detokenize(ids, control=True), 0, set[int]()
    ends = np.cumsum([len(engine.detokenize([one], control=True)) for one in ids])
    assert ends[-1] == len(text)
    for message in (one for one in messages if one["role"] == "user"):
        found = text.index(message["content"], found)
        if message.get("left_out"):
            inside = [
                at for at, end in enumerate(ends) if ends[at - 1] >= found and end <= found + len(message["content"])
            ]
            blocks = [at for at in inside if at % BLOCK == 0 and {*range(at, at + BLOCK)} <= {*inside} and at]
            holes |= {at + one for at in blocks for one in range(BLOCK)}
        found += len(message["content"])
    return holes


@pytest.mark.parametrize("seed", range(6))
def test_a_conversation_whose_messages_are_left_out_one_after_another(
    engine: Engine, tiny_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    messages: list[Message] = [{"role": "user", "content": words(chance, 70)}]
    mask = np.zeros((0, 0), bool)
    errors, reused = (list[float](), list[float]()), 0  # without holes, and with some
    for turn, length in enumerate((66, 12, 0)):
        completion = engine.chat(messages, PARAMS)
        ids = engine.prompt_ids([{"role": one["role"], "content": one["content"]} for one in messages])
        whole = [*ids, *completion.token_ids[:-1]]
        holes = holes_of(engine, messages, ids)
        kept = [at for at in range(len(ids)) if at not in holes]
        cached = completion.usage.cached_tokens
        read = kept[cached] if cached else 0  # the first row that is read now
        new = np.tri(len(whole), dtype=bool)
        new[read:, sorted(holes)] = False
        new[:read, :read] = mask[:read, :read]
        mask = new
        expected = logprobs(tiny_path, whole, mask)[len(ids) - 1 :]
        assert completion.usage.prompt_tokens == len(kept)
        for row, token in zip(expected, completion.logprobs, strict=True):
            pairs = [*token.top, (token.id, token.logprob)]
            errors[bool(holes)].extend([abs(row[one] - logprob) for one, logprob in pairs])
        if turn and holes:
            assert cached >= len([at for at in kept if at < read]) > 0
            reused += cached
        messages += [
            {"role": "assistant", "content": completion.text},
            {"role": "user", "content": words(chance, length)},
        ]
        for at in range(0, 2 * turn + 1, 2):
            messages[at]["left_out"] = seed % 4 == 3 or chance.random() < 0.7
    assert max(errors[1], default=0) < max(0.02, 4 * max(errors[0])) < 1  # a wrong mask costs more than 4
    assert reused > 0


def test_without_the_cache_no_token_sees_what_is_left_out(engine: Engine, tiny_path: Path) -> None:
    """All is read in one batch, at positions with gaps."""
    chance = random.Random(5)
    messages: list[Message] = [{"role": "user", "content": words(chance, 90), "left_out": True}]
    messages += [{"role": "assistant", "content": "I see."}, {"role": "user", "content": "And?"}]
    completion = engine.chat(messages, PARAMS, PromptOptions(cache_prompt=False))
    ids = engine.prompt_ids(messages)
    whole = [*ids, *completion.token_ids[:-1]]
    mask = np.tri(len(whole), dtype=bool)
    mask[:, sorted(holes_of(engine, messages, ids))] = False
    mask |= np.eye(len(whole), dtype=bool)  # what a hole sees is of no use
    expected = logprobs(tiny_path, whole, mask)[len(ids) - 1 :]
    for row, token in zip(expected, completion.logprobs, strict=True):
        assert abs(row[token.id] - token.logprob) < 0.02


def test_what_was_left_out_is_there_again_once_it_is_asked_for(engine: Engine) -> None:
    chance = random.Random(7)
    messages: list[Message] = [{"role": "user", "content": words(chance, 90)}]
    messages += [{"role": "assistant", "content": "I see."}, {"role": "user", "content": "And?"}]
    first = engine.chat(messages, PARAMS)
    holed = engine.chat([messages[0] | {"left_out": True}, *messages[1:]], PARAMS)
    again = engine.chat(messages, PARAMS)
    assert holed.usage.prompt_tokens <= first.usage.prompt_tokens - 4 * BLOCK
    assert again.usage.cached_tokens == first.usage.prompt_tokens - 1
    assert (again.token_ids, again.text) == (first.token_ids, first.text)
    assert np.abs(np.subtract(*([one.logprob for one in each.logprobs] for each in (first, holed)))).max() > 1e-3


def test_a_disk_finds_what_is_left_after_a_restart(tiny_path: Path, tmp_path: Path) -> None:
    chance, asked = random.Random(3), list[Any]()
    messages: list[Message] = [{"role": "user", "content": words(chance, 90)}]
    more = [{"role": "assistant", "content": "I see."}, {"role": "user", "content": "And?"}]
    # The first engine ends before the edit, the second behind it.
    disk: dict[str, Any] = {"cache_disk": "64M", "cache_disk_folder": str(tmp_path)}
    for number in range(3):
        with load_tiny(tiny_path, device="cpu", cache_type="f16", block_size=BLOCK, **disk) as engine:
            if number == 0:
                engine.chat(messages, PARAMS)
            else:
                asked.append(engine.chat([messages[0] | {"left_out": True}, *more], PARAMS))
    assert asked[0].usage.cached_from["disk"] >= BLOCK
    assert asked[1].usage.cached_from["disk"] >= asked[0].usage.cached_tokens
    assert asked[1].text == asked[0].text


def test_where_blocks_cannot_be_left_out_the_error_says_what_to_send(tmp_path: Path) -> None:
    with load_tiny(make_model(tmp_path, "gemma3_tied"), device="cpu") as engine:
        assert not engine.can_leave_out
        with pytest.raises(EngineError, match=r"left_out: .* is read as a whole: send messages without"):
            engine.chat([{"role": "user", "content": "a", "left_out": True}], PARAMS)
    with load_tiny(make_model(tmp_path)) as engine, pytest.raises(EngineError, match="left_out: this prompt is read"):
        engine.chat([{"role": "user", "content": "a", "left_out": True}], SamplingParams(prompt_logprobs=0))
