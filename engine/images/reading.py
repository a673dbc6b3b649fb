"""The images in a prompt's messages: decoded, scaled, and named by ids that stand for their rows.

A message's content may be a list of parts: texts, and images. An image becomes a mark in the message's text, which no
template changes, and the mark becomes the image's ids. These are made of the file's hash, and no token has them. So
whatever is named by ids (blocks in the prefix cache, in tiers and in sessions) knows which image it was computed from.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.engine.data_urls import file_in, is_data_url
from polarlm.engine.errors import EngineError, counted, shown
from polarlm.engine.model.vision_encoders import PlacedImage
from polarlm.engine.state.image_positions import IMAGE_IDS, ImagePositions
from polarlm.model_loaders import Model
from polarlm.model_loaders.limited_process import LimitedProcess, ProcessFailed, TookTooLong
from polarlm.model_loaders.recent import Recent
from polarlm.model_loaders.vision_encoders import MOST_ROWS, ImageShape, VisionEncoder, fit, loss

_WORKER = Path(__file__).with_name("worker.py")
_MOST_PIXELS = 1 << 26  # of a file: 192 MB decoded
# Seconds of processor time for a file. One that takes longer is decoded again, in a process that has other such files
# alone: so a usual photo waits for short turns.
_TURNS = (0.3, 2.0, 10.0)
_PIXELS = 2  # version of how pixels are computed: kept blocks depend on it
_REFUSED_SECONDS = 60.0  # in which a file that took too long is not tried again: a conversation sends it at each turn
_KEPT_REFUSED = 512
_KEPT_BYTES = 1 << 26  # of the pixels of recent images, which a conversation sends again at each turn
_MARK = "\ufffc"  # OBJECT REPLACEMENT CHARACTER, on both sides of an image's name
_MARK_PATTERN = re.compile(f"{_MARK}([0-9a-f]{{32}}){_MARK}")
_LEFT_OUT = "[image left out]"

Message = Mapping[str, Any]


@dataclass(frozen=True)
class PromptImage:
    """An image of a prompt. ids: of its rows. pixels: uint8 (height, width, 3), scaled to `shape`. note: a sentence if
    they are not all that is in its file."""

    shape: ImageShape
    ids: tuple[int, ...]
    pixels: np.ndarray
    note: str = ""


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt whose messages have marks in place of images, and these images by the names in the marks."""

    prompt: Any
    images: Mapping[str, PromptImage]
    _vision_encoder: VisionEncoder | None

    @property
    def ids(self) -> frozenset[int]:
        """The ids of all rows."""
        return frozenset(chain.from_iterable(image.ids for image in self.images.values()))

    def cut(self, text: str) -> list[str | tuple[int, ...]]:
        """Return a template's text, cut at the marks; between texts are an image's ids. The texts have what stands
        before and after an image."""
        texts: list[str | tuple[int, ...]] = []
        last = ""
        for number, piece in enumerate(_MARK_PATTERN.split(text)):
            if number % 2 == 0:
                last += piece
            elif piece not in self.images or self._vision_encoder is None:  # a text that looks like a mark
                last += f"{_MARK}{piece}{_MARK}"
            else:
                image, last = self.images[piece], last + self._vision_encoder.before
                among = dict(image.shape.texts)
                for part in image.shape.parts():
                    texts += [last + among.get(part.start, ""), image.ids[part.start : part.stop]]
                    last = ""
                last = self._vision_encoder.after
        return [*texts, last]

    def place_images(self, ids: Sequence[int], *, sections: bool) -> tuple[ImagePositions | None, list[PlacedImage]]:
        """Return where the images are in the prompt's ids. sections: see `ImagePositions.from_grids`."""
        by_first = {
            image.ids[part.start]: (image, part) for image in self.images.values() for part in image.shape.parts()
        }
        placed_images: list[PlacedImage] = []
        end = 0
        for at in np.flatnonzero(np.asarray(ids) >= IMAGE_IDS).tolist() if by_first else ():
            if at >= end:
                image, part = by_first[ids[at]]
                placed_images.append(PlacedImage(at, image.shape, image.pixels, part))
                end = at + len(part)
        if not placed_images:
            return None, []
        ranges = [range(one.first, one.first + len(one.part)) for one in placed_images]
        grids = [one.shape.grid for one in placed_images]
        return ImagePositions.from_grids(ranges, grids, sections=sections), placed_images


class Images:
    """Reads the images in the messages of prompts. Thread-safe."""

    def __init__(self, model: Model, context: int) -> None:
        """context: the most tokens of a prompt."""
        self._vision_encoder, self._name = model.vision_encoder, model.name
        self._context = context
        self._most_rows = max(1, min(context // 2, MOST_ROWS))  # of an image: half of the context is for text
        self._workers = [LimitedProcess(_WORKER, [_MOST_PIXELS, seconds]) for seconds in _TURNS]
        self._refusals: Recent[str, float] = Recent(_KEPT_REFUSED)  # name → until when
        self._recent: Recent[str, PromptImage] = Recent(_KEPT_BYTES, lambda image: image.pixels.nbytes)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def read(self, prompt: Any, warn: Callable[[str], None] = lambda sentence: None) -> ReadPrompt:
        """Read the images of messages; a prompt of another kind has none. An image of an earlier turn that cannot be
        read is left out, and `warn` is called, as for an image that is not read as a whole. Images in the user's last
        message, unless an answer follows it, must be readable. Raises EngineError, and NobodyWaits."""
        if not isinstance(prompt, Sequence) or isinstance(prompt, str) or not any(map(_has_parts, prompt)):
            return ReadPrompt(prompt, {}, self._vision_encoder)
        images: dict[str, PromptImage] = {}
        requests = _ImageRequests(self._workers)
        question = max((at for at, message in enumerate(prompt) if _role(message) != "system"), default=0)
        messages = []
        for at, message in enumerate(prompt):
            if _has_parts(message):
                texts = []
                for number, part in enumerate(message["content"]):
                    place, count = f"messages[{at}].content[{number}]", len(images)
                    try:
                        text, note = self._text_of(part, images, requests)
                        texts.append(text)
                        if note:
                            warn(f"{place}: {note}")
                    except EngineError as error:
                        if at == question and _role(message) not in ("assistant", "tool"):
                            error.args = (f"{place}: {error}",)
                            raise
                        warn(f"{place} is left out: {error}")
                        texts.append(_LEFT_OUT)
                    if len(images) > count:
                        self._check_fit(images)
                message = {**message, "content": "".join(texts)}
            messages.append(message)
        return ReadPrompt(messages, images, self._vision_encoder)

    def _text_of(self, part: Any, images: dict[str, PromptImage], requests: _ImageRequests) -> tuple[str, str]:
        """(text, note) of a part of a message; an image's text is its mark. Raises EngineError."""
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            return str(part["text"]), ""
        if kind not in ("image", "image_url"):
            raise EngineError('a part of a message is {"type": "text", "text": …} or {"type": "image", "image": …}')
        if self._vision_encoder is None:
            raise EngineError(f"{self._name} takes text alone: load a model that reads images")
        name, image = self._image(_bytes_of(part), requests)
        images[name] = image
        return f"{_MARK}{name}{_MARK}", image.note

    def _check_fit(self, images: Mapping[str, PromptImage]) -> None:
        """Raises EngineError for more rows than the context takes: small files may be many, and their pixels large."""
        rows = sum(image.shape.rows for image in images.values())
        if rows > self._context:
            size = f"the available context size of {counted(self._context, 'token')}"
            problem = f"The prompt's images alone exceed {size}: leave some out"
            raise EngineError(problem, "context_length_exceeded", n_prompt_tokens=rows, n_ctx=self._context)

    def _image(self, data: bytes, requests: _ImageRequests | None = None) -> tuple[str, PromptImage]:
        name = hashlib.blake2b(data, digest_size=16).hexdigest()
        if (image := self._recent.get(name)) is None:
            try:
                if time.monotonic() < (self._refusals.get(name) or 0.0):
                    raise TookTooLong
                image = self._read(data, name, requests or _ImageRequests(self._workers))
            except ProcessFailed as error:
                if isinstance(error, TookTooLong):
                    self._refusals.put(name, time.monotonic() + _REFUSED_SECONDS)
                raise EngineError(f"this image cannot be read: {error}") from None
            self._recent.put(name, image)
        return name, image

    def _read(self, data: bytes, name: str, requests: _ImageRequests) -> PromptImage:
        assert self._vision_encoder is not None
        if find_spec("PIL") is None:
            raise EngineError("images need Pillow, which is not installed: pip install 'polarlm[images]'")
        file = {"data": base64.b64encode(data).decode()}
        width, height = requests.ask(file)["size"]
        lost = loss(self._vision_encoder, width, height)
        shape = fit(self._vision_encoder, width, height)
        while shape.rows > self._most_rows and max(width, height) > 1:
            shrunk = 0.98 * math.sqrt(self._most_rows / shape.rows)
            width, height = max(1, int(width * shrunk)), max(1, int(height * shrunk))
            smaller = fit(self._vision_encoder, width, height)
            if smaller.rows < shape.rows:
                shape = smaller
            elif width <= shape.width and height <= shape.height:  # the least that the vision encoder takes
                break
        to = {"to": [shape.width, shape.height], "filter": self._vision_encoder.filter}
        answer = requests.ask(file | to)
        pixels = np.frombuffer(base64.b64decode(answer["pixels"]), np.uint8)
        description = repr((name, shape, self._vision_encoder, _PIXELS)).encode()
        hashes = np.frombuffer(hashlib.shake_128(description).digest(8 * shape.rows), np.uint64)
        ids = IMAGE_IDS | (hashes >> np.uint64(3)).astype(np.int64)
        pixels = pixels.reshape(shape.height, shape.width, 3)
        return PromptImage(shape, tuple(ids.tolist()), pixels, "; ".join(filter(None, [answer["note"], lost])))


@dataclass
class _ImageRequests:
    """The requests of one prompt to the processes that decode. After a file that takes longer than the short turn,
    later files skip it, so that a prompt of many such files waits for one short turn alone."""

    workers: Sequence[LimitedProcess]
    _turn: int = 0

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer of a worker. Raises EngineError, ProcessFailed and NobodyWaits."""
        while True:
            try:
                answer: dict[str, Any] = self.workers[self._turn].ask(request)
            except TookTooLong:
                if self._turn + 1 == len(self.workers):
                    raise
                self._turn += 1
                continue
            if "error" in answer:
                raise EngineError(answer["error"])
            return answer


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _has_parts(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("content"), (list, tuple))


def _bytes_of(part: Mapping[str, Any]) -> bytes:
    """Return the file of an image's part. Only {"type": "image", "image": path} opens a file: in the form that APIs
    have, a program passes on what its users send. Raises EngineError."""
    image = part.get("image", part.get("image_url"))
    opens = part.get("type") == "image" and "image" in part and not isinstance(image, Mapping)
    if isinstance(image, Mapping):
        image = image.get("url")
    if isinstance(image, str) and is_data_url(image):
        try:
            return file_in(image)
        except ValueError:
            raise EngineError("this data URL is no base64") from None
    if isinstance(image, (bytes, bytearray, memoryview)):
        return bytes(image)
    if isinstance(image, str) and "://" in image:
        raise EngineError("addresses are not fetched: send the image itself, as bytes or as a data URL")
    if isinstance(image, (str, os.PathLike)) and not opens:
        form = '{"type": "image", "image": path}'
        raise EngineError(f"{shown(os.fspath(image))} is no data URL, and no file is opened for it: that does {form}")
    if isinstance(image, (str, os.PathLike)):
        try:
            return Path(image).expanduser().read_bytes()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise EngineError(f"{shown(os.fspath(image))} cannot be read: {reason}") from None
    if hasattr(image, "save"):  # Pillow's
        return _file_of(image)
    raise EngineError("an image is bytes, a path, a data URL or a Pillow image")


def _file_of(image: Any) -> bytes:
    """Return the file of a Pillow image as people see it. Raises EngineError."""
    from polarlm.engine.images import worker  # imports Pillow

    file = io.BytesIO()
    try:
        worker.as_shown(image).save(file, "PNG")
    except Exception as error:  # Pillow reads the file only now, and its decoders raise whatever they stumble over
        raise EngineError(f"this Pillow image cannot be read: {error}") from None
    return file.getvalue()
