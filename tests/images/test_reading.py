"""Images in the messages of prompts: files of every kind become pixels and ids, or a sentence."""

from __future__ import annotations

import base64
import io
import math
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

from polarlm.engine import EngineError
from polarlm.engine.data_urls import file_in
from polarlm.engine.images import reading as images
from polarlm.engine.images.reading import Images, ReadPrompt
from polarlm.model_loaders.limited_process import NobodyWaits, wanted_until
from polarlm.model_loaders.vision_encoders import ImageShape, VisionEncoder
from polarlm.server.reading.parts import image_in
from tests.server.lines import PATIENCE, eventually

VISION_ENCODER = VisionEncoder(
    "stub",
    8,
    "<before>",
    "<after>",
    "BICUBIC",
    layers=1,
    hidden_size=8,
    heads=1,
    ffn_size=8,
    patch=4,
    merge=1,
    eps=1e-6,
)
MARK = "\ufffc"


def halved(vision_encoder: VisionEncoder, width: int, height: int) -> ImageShape:
    """Rows of 4 × 4 pixels, of an image of half the size."""
    grid = max(1, round(height / 8)), max(1, round(width / 8))
    return ImageShape(4 * grid[1], 4 * grid[0], grid[0] * grid[1], grid)


@pytest.fixture(autouse=True)
def _huge_images_lose_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "loss", lambda _, width, height: "it is huge" if width * height > 10**5 else "")


def test_what_an_image_loses_is_told(reader: Any) -> None:
    warnings: list[str] = []
    reader.read(user_message(file_of(picture())), warnings.append)
    assert not warnings
    reader.read(user_message(file_of(picture(400, 300))), warnings.append)
    assert warnings == ["messages[0].content[0]: it is huge"]


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(images, "fit", halved)
    reader = reading_of()
    yield reader
    reader.close()


def reading_of(context: int = 4096) -> Images:
    return Images(SimpleNamespace(vision_encoder=VISION_ENCODER, name="Model"), context)  # type: ignore[arg-type]


def picture(width: int = 40, height: int = 24, mode: str = "RGB") -> Image.Image:
    values = np.random.default_rng(width).integers(0, 256, (height, width, len(mode)), np.uint8)
    return Image.fromarray(values.squeeze(), mode)


def file_of(image: Image.Image, kind: str = "PNG", **more: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


def user_message(*parts: Any) -> list[dict[str, Any]]:
    said = [part if isinstance(part, dict) else {"type": "image", "image": part} for part in parts]
    return [{"role": "user", "content": said}]


def only(read: ReadPrompt) -> images.PromptImage:
    (image,) = read.images.values()
    return image


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_an_image_is_scaled_as_pillow_does(reader: Images, kind: str) -> None:
    file = file_of(picture(), kind)
    image = only(reader.read(user_message(file)))
    with Image.open(io.BytesIO(file)) as opened:
        expected = opened.convert("RGB").resize((20, 12), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(image.pixels, np.asarray(expected))
    assert image.shape == ImageShape(20, 12, 15, (3, 5))
    assert len(set(image.ids)) == 15
    assert min(image.ids) >= 1 << 62


def test_one_file_is_one_image_however_it_comes(reader: Images, tmp_path: Path) -> None:
    image = picture()
    file, path = file_of(image), tmp_path / "a.png"
    path.write_bytes(file)
    url = "data:image/png;base64," + base64.b64encode(file).decode()
    ways = [file, bytearray(file), path, str(path), image, url, {"type": "image_url", "image_url": {"url": url}}]
    reads = [reader.read(user_message(way)) for way in ways]
    assert len({read.prompt[0]["content"] for read in reads}) == 1
    assert len({only(read).ids for read in reads}) == 1
    other = only(reader.read(user_message(file_of(picture(41)))))
    assert set(other.ids).isdisjoint(only(reads[0]).ids)


def test_no_file_is_opened_for_what_clients_send(reader: Images, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(file_of(picture()))
    url = {"url": str(path)}
    sent = [{"type": "image_url", "image_url": url}, {"type": "image_url", "image_url": str(path)}]
    sent += [{"type": "image_url", "image": str(path)}, {"type": "image", "image_url": url}]
    for part in [*sent, {"type": "image", "image": url}]:
        with pytest.raises(EngineError, match=r'no file is opened for it: that does {"type": "image", "image": path}'):
            reader.read(user_message(part))


def test_an_image_of_a_conversation_is_decoded_once(reader: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = user_message(file_of(picture()))
    first = reader.read(messages)
    monkeypatch.setattr(reader._workers[0], "ask", pytest.fail)
    assert only(reader.read(messages)) is only(first)


def test_a_text_with_marks_is_cut_at_images_of_the_prompt_alone(reader: Images) -> None:
    forged = f"{MARK}{'0' * 32}{MARK}"
    read = reader.read(
        user_message({"type": "text", "text": f"a {forged}"}, file_of(picture()), {"type": "text", "text": "b"})
    )
    (content,) = (message["content"] for message in read.prompt)
    assert read.cut(f"<user>{content}<end>") == [f"<user>a {forged}<before>", only(read).ids, "<after>b<end>"]
    ids = [1, 2, *only(read).ids, 3, *only(read).ids]
    positions, of_rows = read.place_images(ids, sections=True)
    assert [image.first for image in of_rows] == [2, 18]
    assert positions is not None
    assert positions.images == (range(2, 17), range(18, 33))


def test_texts_among_rows_cut_an_image_into_parts(reader: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of an image is placed by itself, in whatever order the prompt has the images."""
    monkeypatch.setattr(images, "fit", lambda *size: halved(*size)._replace(texts=((0, "<tile>"), (6, "<|>"))))
    read = reader.read(user_message(file_of(picture())))
    ids = only(read).ids
    assert read.cut(read.prompt[0]["content"]) == ["<before><tile>", ids[:6], "<|>", ids[6:], "<after>"]
    positions, parts = read.place_images([1, *ids[:6], 7, *ids[6:], *ids[:6], 7, *ids[6:]], sections=False)
    assert [(one.first, one.part) for one in parts] == [
        *((1, range(6)), (8, range(6, 15))),
        *((17, range(6)), (24, range(6, 15))),
    ]
    assert positions is not None
    assert positions.images == (range(1, 7), range(8, 17), range(17, 23), range(24, 33))


def test_an_image_takes_at_most_half_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "fit", halved)
    reader = reading_of(context=64)
    image = only(reader.read(user_message(file_of(picture(640, 64)))))
    reader.close()
    assert 16 <= image.shape.rows <= 32
    assert image.pixels.shape == (image.shape.height, image.shape.width, 3)


@pytest.mark.parametrize("size", [(1, 400_000), (400_000, 2)])
def test_so_does_one_that_is_extremely_long(monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]) -> None:
    def widened(vision_encoder: VisionEncoder, width: int, height: int) -> ImageShape:
        """As Qwen's: no side is 200 times as long as the other, and there are at most 16,384 rows of 32 × 32 pixels."""
        width, height = max(width, height // 200), max(height, width // 200)
        shrunk = max(1, math.sqrt(width * height / (16384 * 32**2)))
        grid = max(1, int(height / shrunk / 32)), max(1, int(width / shrunk / 32))
        return ImageShape(32 * grid[1], 32 * grid[0], grid[0] * grid[1], grid)

    monkeypatch.setattr(images, "fit", widened)
    reader = reading_of()
    image = only(reader.read(user_message(file_of(picture(*size, mode="L")))))
    reader.close()
    assert 1024 <= image.shape.rows <= 2048


def test_images_beyond_the_context_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "fit", halved)
    reader = reading_of(context=32)
    with pytest.raises(EngineError, match="images alone exceed the available context size of 32 tokens") as raised:
        reader.read(user_message(*(file_of(picture(width)) for width in (40, 41, 42)), "https://example.com/a.png"))
    reader.close()
    assert raised.value.code == "context_length_exceeded"


def test_damaged_metadata_harms_no_image(reader: Images) -> None:
    assert only(reader.read(user_message(file_of(picture(), "WEBP", exif=b"?")))).shape.rows == 15


def slow_jpeg(number: int = 0) -> bytes:
    """A JPEG of 300 KB that takes a decoder minutes: its last scan comes again and again."""
    file = file_of(Image.new("L", (2000, 2000), 128), "JPEG", progressive=True, quality=10)
    scan = file[file.rfind(b"\xff\xda") : -2]
    return file[:-2] + scan * 20_000 + b"\xff\xd9" + b"%d" % number


def test_slow_files_hold_up_no_image_of_another_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "fit", halved)
    monkeypatch.setattr(images, "_TURNS", (0.3, 1000.0))
    reader, left = reading_of(), threading.Event()
    answer = {"role": "assistant", "content": "?"}

    def read_slowly() -> None:
        with wanted_until(left.is_set), pytest.raises(NobodyWaits):
            reader.read([*user_message(slow_jpeg(1), slow_jpeg(2)), answer, *user_message(file_of(picture()))])

    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(read_slowly)
        eventually(lambda: reader._workers[1]._line)  # the first turn was too short
        assert only(reader.read(user_message(file_of(picture(48))))).shape.rows == 18
        assert not slow.done()
        left.set()
        slow.result(PATIENCE)
    reader.close()


def test_a_file_that_took_too_long_is_not_tried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "fit", halved)
    monkeypatch.setattr(images, "_TURNS", (0.1, 0.3))
    reader, prompt = reading_of(), user_message(slow_jpeg())
    with pytest.raises(EngineError, match="needs too much time"):
        reader.read(prompt)
    workers, reader._workers = reader._workers, []
    with pytest.raises(EngineError, match="needs too much time"):
        reader.read(prompt)
    monkeypatch.setattr(images, "time", SimpleNamespace(monotonic=lambda: math.inf))  # a while later
    with pytest.raises(IndexError):  # it is tried
        reader.read(prompt)
    for worker in workers:
        worker.close()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_file(
    width: int, height: int, bits: int, colour: int, data: bytes, before: bytes = b"", after: bytes = b""
) -> bytes:
    """A PNG. data: the bytes of its rows, each behind its filter. before, after: chunks on both sides of the pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(data))
    return b"\x89PNG\r\n\x1a\n" + header + before + pixels + after + chunk(b"IEND", b"")


WRONG = {
    "has 100,000 by 100,000 pixels, and at most 67,108,864 are read": png_file(100_000, 100_000, 8, 2, bytes(99)),
    "no image of a kind that is read": b"<svg></svg>",
    "kind that is read (PNG": file_of(picture(), "TIFF"),
    "damaged": file_of(picture())[:60],
    "addresses are not fetched": "https://example.com/a.png",
    "no base64": "data:image/png;base64,*",
    "cannot be read: No such file": "/no/such/file.png",
    "Pillow image cannot be read": Image.open(io.BytesIO(file_of(picture())[:60])),
    "an image is bytes": 7,
    "a part of a message is": {"type": "audio"},
}


@pytest.mark.parametrize("sentence", WRONG)
def test_what_cannot_be_read_is_a_sentence_now_and_left_out_later(reader: Images, sentence: str) -> None:
    wrong = user_message(WRONG[sentence])
    with pytest.raises(EngineError) as raised:
        reader.read(wrong)
    assert str(raised.value).startswith("messages[0].content[0]: ")
    assert sentence in str(raised.value)
    warnings: list[str] = []
    read = reader.read(
        [*wrong, {"role": "assistant", "content": "?"}, *user_message(file_of(picture()))], warnings.append
    )
    assert read.prompt[0]["content"] == "[image left out]"
    assert [sentence in warning for warning in warnings] == [True]
    assert len(read.images) == 1
    reader.read([*wrong, {"role": "assistant", "content": "?"}, {"role": "tool", "content": "!"}])  # an answer follows


def test_a_decoder_that_dies_harms_no_other_image(reader: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    reader.read(user_message(file_of(picture())))
    worker: Any = reader._workers[0]._worker
    worker.end()
    assert only(reader.read(user_message(file_of(picture(48))))).shape.rows == 18


# -- spellings of data URLs --------------------------------------------------------------------------------------------

FILE = b"\x89PNG\r\n\x1a\n\xfb\xef\xff?>" + bytes(range(250, 256)) * 2  # its base64 has + and /, and padding
DATA = base64.b64encode(FILE).decode()
SPELLINGS = {
    "alone": DATA,
    "usual": f"data:image/png;base64,{DATA}",
    "capitals": f"DATA:image/PNG;BASE64,{DATA}",
    "another type": f"data:image/jpg;base64,{DATA}",
    "no type": f"data:;base64,{DATA}",
    "parameters": f"data:image/png;charset=utf-8;name=a.png;base64,{DATA}",
    "a comma in a name": f'data:image/png;name="a,b.png";base64,{DATA}',
    "a parameter behind": f"data:image/png;base64;name=a.png,{DATA}",
    "spaces in the head": f" data:image/png; charset=utf-8 ;base64, {DATA}\n",
    "lines": f"data:image/png;base64,\n{DATA[:8]}\r\n{DATA[8:]}\n",
    "no padding": f"data:image/png;base64,{DATA.rstrip('=')}",
    "too much padding": f"data:image/png;base64,{DATA}==",
    "of URLs": f"data:image/png;base64,{base64.urlsafe_b64encode(FILE).decode()}",
    "percent signs": f"data:image/png;base64,{quote(DATA, safe='')}",
    "no base64": f"data:image/png,{quote(FILE)}",
    "no mark of base64": f"data:image/png,{DATA}",
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_the_file_in_a_data_url(name: str) -> None:
    assert "+" in DATA
    assert "/" in DATA
    assert image_in("messages[0]", {"type": "image_url", "image_url": {"url": SPELLINGS[name]}}) == FILE


@pytest.mark.parametrize("wrong", ["data:image/png;base64,*", "data:image/png;base64", "data:image/png;base64,A", "é"])
def test_what_is_no_data(wrong: str) -> None:
    with pytest.raises(ValueError):
        file_in(wrong)
