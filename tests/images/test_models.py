"""Models with images in their prompts: logits are transformers', and nothing of a conversation is computed twice."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from polarlm.command import main
from polarlm.engine import Engine, EngineConfig, EngineError, SamplingParams
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.native.ops import NativeOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.loading.placement.request import companion_bytes
from polarlm.engine.model.batch import PromptBatch, StepBatch
from polarlm.engine.model.forward import Transformer
from polarlm.engine.model.vision_encoders import PlacedImage
from polarlm.engine.model.weights import load_vision_encoder, load_weights
from polarlm.engine.sampling.sample import greedy
from polarlm.engine.state.image_positions import IMAGE_IDS, ImagePositions
from polarlm.engine.state.store import SequenceKV
from polarlm.model_loaders import load_vision_encoder as open_vision_encoder
from polarlm.model_loaders import load_weights as open_weights
from polarlm.model_loaders.vision_encoders import fit
from tests.bare import bare_model, spread
from tests.conftest import FIXTURES
from tests.cuda.emulated import EmulatedDevice
from tests.model.test_vision_encoders import finished
from tests.pairs import each, mostly_slow
from tests.tiny import make_model, preempt

MODELS = sorted(path.parent.name for path in FIXTURES.glob("*/images.npz"))
SETTINGS: dict[str, Any] = {"device": "cpu", "block_size": 16, "ctx_size": 256, "kept_sequences": 8}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


class Prompt(NamedTuple):
    """A prompt of a fixture, its rows of images with ids of their own, and what transformers say about it."""

    ids: list[int]
    images: list[PlacedImage]
    positions: ImagePositions
    logits: np.ndarray
    greedy: list[int]


def opened(name: str, ops: Any) -> tuple[Transformer, Prompt]:
    config, source, _ = open_weights(FIXTURES / name)
    vision_encoder, vision_source = open_vision_encoder(FIXTURES / name, config, None) or (None, None)
    assert vision_encoder is not None
    assert vision_source is not None
    weights = replace(load_weights(ops, config, source), images=load_vision_encoder(ops, vision_encoder, vision_source))
    with np.load(FIXTURES / name / "images.npz") as said:
        ids, at = said["ids"].tolist(), 0
        images, token = [], said["image_token"]
        for number in range(said["images"]):
            pixels = said[f"pixels_{number}"]
            shape = fit(vision_encoder, pixels.shape[1], pixels.shape[0])
            for part in shape.parts():
                first = ids.index(token, at)
                at = first + len(part)
                assert ids[first:at] == [token] * len(part)
                assert len(shape.texts) == 0 or ids[at] != token  # what stands between lines of rows
                ids[first:at] = range(IMAGE_IDS + first, IMAGE_IDS + at)
                images.append(PlacedImage(first, shape, pixels, part))
        assert token not in ids
        ranges = [range(one.first, one.first + len(one.part)) for one in images]
        positions = ImagePositions.from_grids(ranges, [one.shape.grid for one in images], sections=config.has_sections)
        prompt = Prompt(ids, images, positions, said["logits"], said["greedy"].tolist())
    return bare_model(config, weights, ops=ops), prompt


def fed(model: Transformer, prompt: Prompt, *cuts: int) -> tuple[SequenceKV, np.ndarray]:
    """The sequence of a prompt that is fed in spans, cut at these positions, and its logits (T, V)."""
    kv, logits = model.store.new_sequence(), []
    kv.image_positions = prompt.positions
    edges = [0, *cuts, len(prompt.ids)]
    for first, end in pairwise(edges):
        span = model.store.open(kv, end - first)
        units = model.chunks(PromptBatch([span], prompt.ids[first:end], images=prompt.images))
        hidden, _ = finished(units)
        model.store.commit(span)
        logits.append(model.logits(hidden))
    return kv, np.concatenate(logits)


BACKENDS = {"numpy": NumpyOps, "native": NativeOps, "cuda": lambda: CudaOps(EmulatedDevice())}


OFTEN = [*each(MODELS, ["numpy", "native"]), ("qwen3_vl_deepstack_tied", "cuda")]


@mostly_slow("name, backend", [*product(MODELS, BACKENDS)], OFTEN)
def test_logits_after_images_are_those_of_transformers(name: str, backend: str) -> None:
    model, prompt = opened(name, BACKENDS[backend]())
    kv, logits = fed(model, prompt)
    text = np.array([one < IMAGE_IDS for one in prompt.ids])
    allowed = 2**-8 if model.ops.backend == "cuda" else 1e-3  # a GPU's inputs of products are halves
    assert np.abs(logits - prompt.logits)[text].max() <= allowed * spread(prompt.logits)
    answer, inputs = [int(logits[-1].argmax())], [greedy(model.config.vocab_size)]
    while len(answer) < len(prompt.greedy):
        span = model.store.open_step(kv)
        answer += model.step(StepBatch([span], answer[-1:], inputs)).wait()
        model.store.commit(span)
    assert answer == prompt.greedy


EARLIER_ALONE = [name for name in MODELS if not name.startswith("gemma")]  # rows see earlier ones alone


@pytest.mark.parametrize("name", EARLIER_ALONE)
def test_a_prompt_may_be_cut_inside_an_image(name: str) -> None:
    """A prefix hit ends anywhere: the image is computed once more, and its other rows continue from the stored ones."""
    model, prompt = opened(name, NumpyOps())
    _, whole = fed(model, prompt)
    first, *_, last = prompt.images
    after = last.first + len(last.part)
    _, cut = fed(model, prompt, first.first + 1, last.first + 1, after)
    assert np.abs(cut - whole)[after:].max() <= 1e-2 * spread(whole)  # earlier spans are read in half precision


def picture(seed: int, width: int = 24, height: int = 16) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


def said(*parts: Any) -> dict[str, Any]:
    kinds = {str: "text", bytes: "image"}
    return {"role": "user", "content": [{"type": kinds[type(part)], kinds[type(part)]: part} for part in parts]}


KINDS = ["qwen3_vl_deepstack_tied", "qwen3_5_moe_with_images", "gemma3_with_images", "mistral3_lines", "lfm2_vl_tied"]
SOME_KINDS = [KINDS[0], KINDS[2]]  # images with positions in two dimensions, and images whose rows see one another


@pytest.fixture(params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_model(tmp_path, request.param)


class Loaded:
    """An engine whose vision encoder counts the images that it reads, with marks around images that the tiny tokenizer
    has."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.engine = engine = Engine.load(path, **SETTINGS | settings)
        images, reader, self.read = engine._answers._images, engine._model.weights.images, 0
        assert images._vision_encoder is not None
        marks = {"before": "!", "after": "?", "line_end": "-"}
        known = {name: mark for name, mark in marks.items() if hasattr(images._vision_encoder, name)}
        images._vision_encoder = replace(images._vision_encoder, **known)
        compute = reader.read

        def counted(*arguments: Any) -> Iterator[None]:
            self.read += 1
            return (yield from compute(*arguments))

        reader.read = counted

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.close()


def turns(loaded: Loaded, first: list[dict[str, Any]]) -> tuple[list[str], list[int]]:
    """The answers to three turns of a conversation, and how many tokens of each prompt were stored."""
    messages, texts, cached = first, [], []
    for more in (said("and this ", picture(2), " is"), said("so"), None):
        answer = loaded.engine.chat(messages, GREEDY)
        texts.append(answer.text)
        cached.append(answer.usage.cached_tokens)
        messages = [*messages, {"role": "assistant", "content": answer.text}, *([more] if more else [])]
    return texts, cached


FIRST = [said("what is ", picture(1), " here, and ", picture(1, 16, 40), "?")]


@mostly_slow("path", KINDS, SOME_KINDS, indirect=["path"])
def test_no_turn_reads_text_or_images_again(path: Path, tmp_path: Path) -> None:
    """Nor does one after a restart, or one that has a session."""
    disk = {"cache_disk": "1G", "cache_disk_folder": str(tmp_path / "blocks"), "cache_type": "f16"}
    with Loaded(path, **disk) as loaded:
        texts, cached = turns(loaded, FIRST)
        assert cached[0] == 0
        assert cached[2] > cached[1] > 40
        assert loaded.read == 3
        loaded.engine.save_session(tmp_path / "session", prompt=FIRST)
    for settings in (disk, {"cache_type": "f16"}):
        with Loaded(path, **settings) as again:
            if settings is not disk:
                again.engine.load_session(tmp_path / "session")
            answer = again.engine.chat(FIRST, GREEDY)
            assert answer.text == texts[0]
            assert answer.usage.cached_tokens >= answer.usage.prompt_tokens - 16  # complete blocks are on the disk
            assert again.read == 0


def test_memory_counts_the_vision_encoder_unless_it_is_left_out(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, model = EngineConfig(weights=str(path)), open_weights(path)[0]
    assert companion_bytes(config, NumpyOps(), model, path)(64) > 10_000
    assert companion_bytes(replace(config, mmproj="none"), NumpyOps(), model, path)(64) == 0
    with Engine.load(path, mmproj="none", **SETTINGS) as engine:
        assert not engine.reads_images
        with pytest.raises(EngineError, match="takes text alone"):
            engine.chat(FIRST)
    main(["show", str(path)])
    assert "images      read, by " in capsys.readouterr().out


@mostly_slow("path", KINDS, SOME_KINDS, indirect=["path"])
def test_another_image_of_the_same_size_shares_nothing(path: Path) -> None:
    with Loaded(path) as loaded:
        one, other = ([said(picture(seed), "what is it?")] for seed in (1, 2))
        ids = loaded.engine.prompt_ids(one)
        loaded.engine.chat(one, GREEDY)
        answer = loaded.engine.chat(other, GREEDY)
        assert answer.usage.cached_tokens <= ids.index(next(i for i in ids if i >= IMAGE_IDS))
        assert loaded.read == 2


@mostly_slow("path", KINDS, SOME_KINDS, indirect=["path"])
def test_another_vision_encoder_of_the_same_sizes_shares_nothing(path: Path, tmp_path: Path) -> None:
    with Loaded(path) as loaded:
        loaded.engine.chat(FIRST, GREEDY)
        loaded.engine.save_session(tmp_path / "session", prompt=FIRST)
    weights = load_file(path / "model.safetensors")
    changed = {name: -values if "patch_" in name else values for name, values in weights.items()}
    save_file(changed, path / "model.safetensors")
    with Loaded(path) as loaded:
        loaded.engine.load_session(tmp_path / "session")
        ids = loaded.engine.prompt_ids(FIRST)
        answer = loaded.engine.chat(FIRST, GREEDY)
        assert answer.usage.cached_tokens <= ids.index(next(i for i in ids if i >= IMAGE_IDS))


@mostly_slow("path", KINDS, SOME_KINDS, indirect=["path"])
def test_preempted_and_batched_requests_answer_as_alone(path: Path) -> None:
    with Loaded(path) as loaded:
        expected = loaded.engine.chat(FIRST, GREEDY).text
    with Loaded(path, kept_sequences=0) as loaded:
        stream = loaded.engine.stream(FIRST, GREEDY)
        text = "".join(next(stream).text for _ in range(4))
        preempt(loaded.engine)
        assert text + "".join(chunk.text for chunk in stream) == expected
        texts = loaded.engine.generate([FIRST, [said("a text")], FIRST], GREEDY)
        assert [texts[0].text, texts[2].text] == [expected, expected]


TOKENS_ALONE = [{"spec_type": "ngram-simple"}, {"repeat_penalty": 1.3}, {"dry_multiplier": 0.8}]


@mostly_slow("path, more", product(KINDS, TOKENS_ALONE), each(KINDS, TOKENS_ALONE), indirect=["path"])
def test_drafts_and_penalties_are_of_tokens_alone(path: Path, more: dict[str, Any]) -> None:
    """A prompt that shows an image twice has its ids twice, which must neither be drafted nor penalised."""
    twice = [said(picture(1), "na na na na na", picture(1), "na na na")]
    with Loaded(path) as loaded:
        plain = loaded.engine.chat(twice, GREEDY)
        answer = loaded.engine.chat(twice, replace(GREEDY, **more))
        assert answer.usage.completion_tokens == plain.usage.completion_tokens
        if "spec_type" in more:
            assert answer.text == plain.text
