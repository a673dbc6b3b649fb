"""What a model sees of an image is what people see of it: a table of the forms that files have, and their pixels."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from polarlm.engine import EngineError
from polarlm.engine.images import reading
from polarlm.engine.images.reading import Images
from polarlm.model_loaders.vision_encoders import ImageShape
from tests.images.test_reading import chunk, file_of, only, png_file, reading_of, user_message

WHITE, BLACK, RED = (255, 255, 255), (0, 0, 0), (200, 10, 20)
Pixels = Sequence[Sequence[Sequence[int]]]  # of rows


@pytest.fixture(scope="module")
def images() -> Iterator[Images]:
    """Of a vision encoder that takes each image at its own size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "fit", lambda vision_encoder, width, height: ImageShape(width, height, 1, (1, 1)))
        patch.setattr(reading, "loss", lambda vision_encoder, width, height: "")
        made = reading_of()
        yield made
        made.close()


def png(bits: int, colour: int, row: bytes, width: int, before: bytes = b"", after: bytes = b"") -> bytes:
    """A PNG of one row."""
    return png_file(width, 1, bits, colour, b"\0" + row, before, after)


def key(*values: int) -> bytes:
    """The chunk with the transparent colour."""
    return chunk(b"tRNS", struct.pack(f">{len(values)}H", *values))


def words(*values: int) -> bytes:
    return struct.pack(f">{len(values)}H", *values)


def row(mode: str, *pixels: Any) -> Image.Image:
    image = Image.new(mode, (len(pixels), 1))
    image.putdata(pixels)
    return image


def indexed(*indices: int) -> Image.Image:
    """A row of a palette of black, red and white."""
    image = row("P", *indices)
    image.putpalette([*BLACK, *RED, *WHITE])
    return image


def frames(kind: str, *colours: Any, mode: str = "RGB", **more: Any) -> bytes:
    first, *others = (row(mode, colour, colour) for colour in colours)
    return file_of(first, kind, save_all=True, append_images=others, **more)


def in_a_corner() -> bytes:
    """A GIF of 3 × 1 pixels whose first picture has the second of them alone."""
    file = bytearray(file_of(indexed(1), "GIF"))
    file[6:8] = struct.pack("<H", 3)
    at = file.index(b"\x2c\0\0\0\0")
    file[at + 1 : at + 3] = struct.pack("<H", 1)
    return bytes(file)


def bitmap(alpha: int) -> bytes:
    """A BMP of one pixel in 32 bits, of the version that has an alpha channel."""
    header = struct.pack("<IiiHHIIiiII4I", 108, 1, 1, 1, 32, 3, 4, 0, 0, 0, 0, 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    header += bytes(108 - len(header))
    return b"BM" + struct.pack("<IHHI", 18 + len(header), 0, 0, 14 + len(header)) + header + bytes((20, 10, 200, alpha))


def exchanging() -> bytes:
    """A colour profile in which red is shown as blue, and blue as red."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    entries = range(132, 132 + 12 * struct.unpack_from(">I", profile, 128)[0], 12)
    red, blue = (next(at for at in entries if profile[at : at + 4] == name) + 4 for name in (b"rXYZ", b"bXYZ"))
    profile[red : red + 8], profile[blue : blue + 8] = profile[blue : blue + 8], profile[red : red + 8]
    return bytes(profile).replace("sRGB".encode("utf-16-be"), "swap".encode("utf-16-be"))


def turned(kind: str, orientation: int, **more: Any) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return file_of(CORNERS, kind, exif=exif, **more)


CORNERS = Image.fromarray(np.kron(np.array([[0, 80], [160, 240]], np.uint8), np.ones((16, 16), np.uint8)))
UPRIGHT = {  # the corners of CORNERS, row by row, by EXIF's orientation
    1: (0, 80, 160, 240),
    2: (80, 0, 240, 160),
    3: (240, 160, 80, 0),
    4: (160, 240, 0, 80),
    5: (0, 160, 80, 240),
    6: (160, 0, 240, 80),
    7: (240, 80, 160, 0),
    8: (80, 240, 0, 160),
}
EXIF = Image.Exif()
EXIF[0x0112] = 2
HIDDEN = ((9, 8, 7, 0), (*RED, 255), (0, 0, 0, 128))
SEEN = (WHITE, RED, (127, 127, 127))

FORMS: dict[str, tuple[Callable[[], Any], Sequence[Sequence[int]]]] = {  # name → file or Pillow image, row of pixels
    "RGBA in PNG": (lambda: file_of(row("RGBA", *HIDDEN)), SEEN),
    "RGBA in WebP": (lambda: file_of(row("RGBA", *HIDDEN), "WEBP", lossless=True, exact=True), SEEN),
    "RGBA of 16 bits": (lambda: png(16, 6, words(9, 9, 9, 0, *(v * 257 for v in RED), 65535), 2), (WHITE, RED)),
    "grey with alpha": (lambda: file_of(row("LA", (0, 0), (70, 255))), (WHITE, (70,) * 3)),
    "grey of 16 bits with alpha": (lambda: png(16, 4, words(0, 0, 0x4600, 65535), 2), (WHITE, (70,) * 3)),
    "palette": (lambda: file_of(indexed(0, 1, 2)), (BLACK, RED, WHITE)),
    "palette with a transparent entry": (lambda: file_of(indexed(0, 1), transparency=0), (WHITE, RED)),
    "palette with an entry half transparent": (
        lambda: file_of(indexed(0, 1), transparency=bytes((128, 255))), ((127,) * 3, RED)),
    "GIF with a transparent entry": (lambda: file_of(indexed(0, 1), "GIF", transparency=0), (WHITE, RED)),
    "RGB with a transparent colour": (
        lambda: file_of(row("RGB", (9, 8, 7), (9, 8, 8)), transparency=(9, 8, 7)), (WHITE, (9, 8, 8))),
    "RGB of 16 bits with a transparent colour": (
        lambda: png(16, 2, words(257, 257, 257, 257, 257, 258), 2, key(257, 257, 257)), (WHITE, (1, 1, 1))),
    "grey with a transparent value": (lambda: png(8, 0, bytes((3, 9)), 2, key(3)), (WHITE, (9, 9, 9))),
    "grey of 4 bits with one": (lambda: png(4, 0, bytes((0x3A,)), 2, key(3)), (WHITE, (170,) * 3)),
    "grey of 2 bits with one": (lambda: png(2, 0, bytes((0b00011011,)), 4, key(1)), (BLACK, WHITE, (170,) * 3, WHITE)),
    "grey of 1 bit with one": (lambda: png(1, 0, bytes((0b01000000,)), 2, key(0)), (WHITE, WHITE)),
    "grey of 16 bits with one": (lambda: png(16, 0, words(257, 256, 514), 3, key(257)), (WHITE, (1,) * 3, (2,) * 3)),
    "grey of 16 bits": (lambda: png(16, 0, words(0, 257, 32896, 65535), 4), (BLACK, (1,) * 3, (128,) * 3, WHITE)),
    "RGB of 16 bits": (lambda: png(16, 2, words(0, 32896, 65535), 1), ((0, 128, 255),)),
    "1 bit": (lambda: file_of(row("1", 0, 1)), (BLACK, WHITE)),
    "CMYK in JPEG": (lambda: file_of(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"), ((255, 0, 0),)),
    "several pictures in a JPEG": (lambda: frames("MPO", RED, BLACK), (RED,)),
    "BMP with alpha": (lambda: bitmap(0x80), ((227, 132, 137),)),
    "BMP whose alpha is nothing": (lambda: bitmap(0), (RED,)),
    "animated GIF": (lambda: frames("GIF", RED, BLACK), (RED,)),
    "GIF whose first picture is a part": (in_a_corner, (WHITE, RED, WHITE)),
    "animated WebP": (lambda: frames("WEBP", RED, BLACK, lossless=True), (RED,)),
    "animated PNG": (lambda: frames("PNG", RED, BLACK), (RED,)),
    "animated PNG with a picture for others": (lambda: frames("PNG", BLACK, RED, WHITE, default_image=True), (RED,)),
    "animated PNG with one, transparent": (
        lambda: frames("PNG", (*RED, 255), (0, 0, 0, 128), HIDDEN[0], mode="RGBA", default_image=True, blend=1),
        ((127,) * 3,)),
    "colour profile": (
        lambda: file_of(row("RGB", (255, 10, 0), WHITE), icc_profile=exchanging()), ((0, 10, 255), WHITE)),
    "profile of another kind": (lambda: file_of(row("L", 77), icc_profile=exchanging()), ((77,) * 3,)),
    "damaged profile": (lambda: file_of(row("RGB", RED), icc_profile=b"?" * 200), (RED,)),
    "eXIf before the pixels": (
        lambda: png(8, 0, bytes((3, 9)), 2, chunk(b"eXIf", EXIF.tobytes()[6:])), ((9,) * 3, (3,) * 3)),
    "eXIf behind the pixels": (
        lambda: png(8, 0, bytes((3, 9)), 2, after=chunk(b"eXIf", EXIF.tobytes()[6:])), ((9,) * 3, (3,) * 3)),
    "Pillow image with alpha": (lambda: row("RGBA", *HIDDEN), SEEN),
    "Pillow image in CMYK": (lambda: row("CMYK", (0, 255, 255, 0)), ((255, 0, 0),)),
    "Pillow image of a palette": (lambda: indexed(0, 1), (BLACK, RED)),
    "Pillow image of 16 bits": (lambda: Image.fromarray(np.array([[0, 257, 65535]], "<u2")), (BLACK, (1,) * 3, WHITE)),
    "integers": (lambda: row("I", 0, 257, 65535), (BLACK, (1,) * 3, WHITE)),
    "integers of 8 bits": (lambda: row("I", 0, 9, 200), (BLACK, (9,) * 3, (200,) * 3)),
    "floats up to 1": (lambda: row("F", 0.0, 0.5, 1.0), (BLACK, (128,) * 3, WHITE)),
    "floats up to 255": (lambda: row("F", 0.0, 9.0, 200.0), (BLACK, (9,) * 3, (200,) * 3)),
    "floats of any range": (lambda: row("F", -1.0, 0.0, 1.0), (BLACK, (128,) * 3, WHITE)),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_a_picture_is_seen_as_people_see_it(images: Images, name: str) -> None:
    make, expected = FORMS[name]
    pixels = only(images.read(user_message(make()))).pixels[:1, : len(expected)]
    np.testing.assert_allclose(pixels.astype(int), [expected], atol=2 if "JPEG" in name else 1)


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize(("kind", "more"), [("JPEG", {"quality": 95}), ("PNG", {}), ("WEBP", {"lossless": True})])
def test_a_photo_is_upright(images: Images, kind: str, more: dict[str, Any], orientation: int) -> None:
    file = turned(kind, orientation, **more)
    for image in (file, Image.open(io.BytesIO(file))):
        corners = only(images.read(user_message(image))).pixels[8::16, 8::16, 0]
        np.testing.assert_allclose(corners.astype(int).ravel(), UPRIGHT[orientation], atol=3)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_who_sends_an_animation_is_told_that_it_is_seen_in_part(images: Images, kind: str) -> None:
    told: list[str] = []
    images.read(user_message(file_of(row("RGB", RED)), frames(kind, RED, BLACK)), told.append)
    assert told == ["messages[0].content[1]: this image is animated, and its first picture alone is read"]


def noise() -> Image.Image:
    values = np.random.default_rng(1).integers(0, 256, (16, 24, 3), np.uint8)
    return Image.fromarray(values).resize((96, 64), Image.Resampling.BICUBIC)


CUT: dict[str, dict[str, Any]] = {
    "PNG": {},
    "GIF": {},
    "BMP": {},
    "JPEG": {},
    "progressive JPEG": {"progressive": True},
    "WEBP": {},
    "lossless WEBP": {"lossless": True},
}


@pytest.mark.parametrize("name", CUT)
def test_a_file_that_is_cut_off_is_seen_as_far_as_it_goes(images: Images, name: str) -> None:
    told: list[str] = []
    file = file_of(noise(), name.split()[-1], **CUT[name])
    whole = only(images.read(user_message(file))).pixels.astype(int)
    short = only(images.read(user_message(file[:-30]), told.append)).pixels.astype(int)
    assert (abs(short - whole).max(axis=2) <= 16).mean() > 0.85
    assert told == [] if (short == whole).all() else ["cut off" in sentence for sentence in told] == [True]
    with pytest.raises(EngineError, match=r"damaged|no image of a kind"):
        images.read(user_message(file[:50]))


@pytest.mark.parametrize("name", ["PNG", "GIF", "BMP", "WEBP"])
def test_what_a_file_lacks_is_white(images: Images, name: str) -> None:
    file = file_of(noise(), name)
    whole = only(images.read(user_message(file))).pixels.astype(int)
    half = only(images.read(user_message(file[: len(file) // 2]))).pixels.astype(int)
    white, same = (half == 255).all(axis=2), abs(half - whole).max(axis=2) <= 16
    assert 0.3 < white.mean() < 0.8
    assert (white | same).mean() > 0.97
