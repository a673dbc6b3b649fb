"""The images in a prompt's messages: decoded, scaled, and named by ids that stand for their rows.

A message's content may be a list of parts: texts, and images. An image becomes a mark in the message's text, which no
template changes, and the mark becomes the image's ids. These are made of the file's hash, and no token has them. So
whatever is named by ids (blocks in the prefix cache, in tiers and in sessions) knows which image it was computed from.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.engine.errors import EngineError, counted, shown
from polarlm.engine.model.towers._rows import PlacedImage
from polarlm.engine.state.places import IMAGE_IDS, Places
from polarlm.model_loaders import Model
from polarlm.model_loaders.limited_process import LimitedProcess, ProcessFailed
from polarlm.model_loaders.recent import Recent
from polarlm.model_loaders.towers import MOST_ROWS, ImageShape, Tower, fit

_WORKER = Path(__file__).with_name("worker.py")
_MOST_PIXELS = 1 << 26  # of a file: 192 MB decoded
_KEPT_BYTES = 1 << 26  # of the pixels of recent images, which a conversation sends again at each turn
_MARK = "\ufffc"  # OBJECT REPLACEMENT CHARACTER, on both sides of an image's name
_MARKED = re.compile(f"{_MARK}([0-9a-f]{{32}}){_MARK}")
_LEFT_OUT = "[image left out]"

Message = Mapping[str, Any]


@dataclass(frozen=True)
class PromptImage:
    """An image of a prompt. ids: of its rows. pixels: uint8 (height, width, 3), scaled to `shape`."""

    shape: ImageShape
    ids: tuple[int, ...]
    pixels: np.ndarray


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt whose messages have marks in place of images, and these images by the names in the marks."""

    prompt: Any
    images: Mapping[str, PromptImage]
    _tower: Tower | None

    @property
    def ids(self) -> frozenset[int]:
        """The ids of all rows."""
        return frozenset(chain.from_iterable(image.ids for image in self.images.values()))

    def cut(self, text: str) -> list[str | tuple[int, ...]]:
        """Return a template's text, cut at the marks; between texts are an image's ids. The texts have what stands
        before and after an image."""
        texts: list[str | tuple[int, ...]] = []
        last = ""
        for number, piece in enumerate(_MARKED.split(text)):
            if number % 2 == 0:
                last += piece
            elif piece not in self.images or self._tower is None:  # a text that looks like a mark
                last += f"{_MARK}{piece}{_MARK}"
            else:
                texts += [last + self._tower.before, self.images[piece].ids]
                last = self._tower.after
        return [*texts, last]

    def places(self, ids: Sequence[int], *, sections: bool) -> tuple[Places | None, list[PlacedImage]]:
        """Return where the images are in the prompt's ids. sections: see `Places.of`."""
        by_first = {image.ids[0]: image for image in self.images.values()}
        found: list[PlacedImage] = []
        end = 0
        for at in np.flatnonzero(np.asarray(ids) >= IMAGE_IDS).tolist() if by_first else ():
            if at >= end:
                image = by_first[ids[at]]
                found.append(PlacedImage(at, image.shape, image.pixels))
                end = at + image.shape.rows
        if not found:
            return None, []
        ranges = [range(one.first, one.first + one.shape.rows) for one in found]
        return Places.of(ranges, [one.shape.grid for one in found], sections=sections), found


class Images:
    """Reads the images in the messages of prompts. Thread-safe."""

    def __init__(self, model: Model, context: int) -> None:
        """context: the most tokens of a prompt."""
        self._tower, self._name = model.tower, model.name
        self._context = context
        self._most_rows = max(1, min(context // 2, MOST_ROWS))  # of an image: half of the context is for text
        self._worker = LimitedProcess(_WORKER, _MOST_PIXELS)
        self._recent: Recent[str, PromptImage] = Recent(_KEPT_BYTES, lambda image: image.pixels.nbytes)

    def close(self) -> None:
        self._worker.close()

    def read(self, prompt: Any, warn: Callable[[str], None] = lambda sentence: None) -> ReadPrompt:
        """Read the images of messages; a prompt of another kind has none. What cannot be read in an earlier turn is
        left out, and `warn` called; the user's message is what is asked now until an answer follows. Raises
        EngineError."""
        if not isinstance(prompt, Sequence) or isinstance(prompt, str) or not any(map(_has_parts, prompt)):
            return ReadPrompt(prompt, {}, self._tower)
        images: dict[str, PromptImage] = {}
        asked = max((at for at, message in enumerate(prompt) if _role(message) != "system"), default=0)
        messages = []
        for at, message in enumerate(prompt):
            if _has_parts(message):
                texts = []
                for number, part in enumerate(message["content"]):
                    place, known = f"messages[{at}].content[{number}]", len(images)
                    try:
                        texts.append(self._text_of(part, images))
                    except EngineError as error:
                        if at == asked and _role(message) not in ("assistant", "tool"):
                            error.args = (f"{place}: {error}",)
                            raise
                        warn(f"{place} is left out: {error}")
                        texts.append(_LEFT_OUT)
                    if len(images) > known:
                        self._check_fit(images)
                message = {**message, "content": "".join(texts)}
            messages.append(message)
        return ReadPrompt(messages, images, self._tower)

    def _text_of(self, part: Any, images: dict[str, PromptImage]) -> str:
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            return str(part["text"])
        if kind not in ("image", "image_url"):
            raise EngineError('a part of a message is {"type": "text", "text": …} or {"type": "image", "image": …}')
        if self._tower is None:
            raise EngineError(f"{self._name} takes text alone: load a model that reads images")
        name, image = self._image(_bytes_of(part))
        images[name] = image
        return f"{_MARK}{name}{_MARK}"

    def _check_fit(self, images: Mapping[str, PromptImage]) -> None:
        """Raises EngineError for more rows than the context takes: small files may be many, and their pixels large."""
        rows = sum(image.shape.rows for image in images.values())
        if rows > self._context:
            size = f"the available context size of {counted(self._context, 'token')}"
            problem = f"The prompt's images alone exceed {size}: leave some out"
            raise EngineError(problem, "context_length_exceeded", n_prompt_tokens=rows, n_ctx=self._context)

    def _image(self, data: bytes) -> tuple[str, PromptImage]:
        name = hashlib.blake2b(data, digest_size=16).hexdigest()
        if (image := self._recent.get(name)) is None:
            image = self._read(data, name)
            self._recent.put(name, image)
        return name, image

    def _read(self, data: bytes, name: str) -> PromptImage:
        assert self._tower is not None
        if find_spec("PIL") is None:
            raise EngineError("images need Pillow, which is not installed: pip install 'polarlm[images]'")
        file = {"data": base64.b64encode(data).decode()}
        width, height = self._ask(file)["size"]
        shape = fit(self._tower, width, height)
        while shape.rows > self._most_rows and max(width, height) > 1:
            shrunk = 0.98 * math.sqrt(self._most_rows / shape.rows)
            width, height = max(1, int(width * shrunk)), max(1, int(height * shrunk))
            smaller = fit(self._tower, width, height)
            if smaller.rows < shape.rows:
                shape = smaller
            elif width <= shape.width and height <= shape.height:  # the least that the tower takes
                break
        to = {"to": [shape.width, shape.height], "filter": self._tower.filter}
        pixels = np.frombuffer(base64.b64decode(self._ask(file | to)["pixels"]), np.uint8)
        described = repr((name, shape, self._tower)).encode()
        hashes = np.frombuffer(hashlib.shake_128(described).digest(8 * shape.rows), np.uint64)
        ids = IMAGE_IDS | (hashes >> np.uint64(3)).astype(np.int64)
        return PromptImage(shape, tuple(ids.tolist()), pixels.reshape(shape.height, shape.width, 3))

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self._worker.ask(request)
        except ProcessFailed as error:
            raise EngineError(f"this image cannot be read: {error}") from None
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _has_parts(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("content"), (list, tuple))


def _bytes_of(part: Mapping[str, Any]) -> bytes:
    """Return the file of an image's part. Raises EngineError."""
    image = part.get("image", part.get("image_url"))
    if isinstance(image, Mapping):
        image = image.get("url")
    if isinstance(image, str) and image.startswith("data:"):
        try:
            return base64.b64decode(image.partition(",")[2], validate=True)
        except (binascii.Error, ValueError):
            raise EngineError("this data URL is no base64") from None
    if isinstance(image, (bytes, bytearray, memoryview)):
        return bytes(image)
    if isinstance(image, str) and "://" in image:
        raise EngineError("addresses are not fetched: send the image itself, as bytes or as a data URL")
    if isinstance(image, (str, os.PathLike)):
        try:
            return Path(image).expanduser().read_bytes()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise EngineError(f"{shown(os.fspath(image))} cannot be read: {reason}") from None
    if hasattr(image, "save"):  # Pillow's
        file = io.BytesIO()
        try:
            image.convert("RGB").save(file, "PNG")
        except Exception as error:  # Pillow reads the file only now, and its decoders raise whatever they stumble over
            raise EngineError(f"this Pillow image cannot be read: {error}") from None
        return file.getvalue()
    raise EngineError("an image is bytes, a path, a data URL or a Pillow image")
