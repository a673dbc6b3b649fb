"""Decodes image files for its parent process: JSON lines in, JSON lines out.

A file can be made to take any time or memory, or to use a fault of a decoder, so it is decoded here, with limits of
both. The first line has the most pixels of an image, and the seconds of processor time for a file. Each further line
is a request: {"data": the file in base64} is answered by {"size": [width, height]} of the upright image; with "to"
([width, height]) and "filter" by {"pixels": its pixels in base64, uint8 (height, width, 3), scaled, "note": a sentence
if they are not all that is in the file, or ""}; and {"error": a sentence} by both. This file imports none of the rooms.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial, reduce
from typing import Any, cast

from PIL import Image, ImageChops, ImageCms, ImageFile, UnidentifiedImageError
from PIL.GifImagePlugin import GifImageFile
from PIL.PngImagePlugin import Blend, PngImageFile

from polarlm.children import answer_lines, limit_time

MEMORY_BYTES = 2 << 30  # address space
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_ANIMATED = "this image is animated, and its first picture alone is read"
_CUT = "the file of this image is cut off or damaged: what it lacks is left white or grey"
_DAMAGED_IMAGE = "this image is damaged"
_MOST_LOST = 7 / 8  # of the pixels; an image that lacks more is not read
_FILLERS = (0, 255, 1, 51, 85)  # WebP's decoder refuses some of them
_JPEG = ("JPEG", "MPO")  # MPO: several of them, of which the first is shown
_GIF_BLOCK = 256  # bytes that are decoded together
_GREY = ((128, 128),) * 3  # the extremes of a JPEG of which nothing could be decoded
_FACTORS = {"L;2": 85, "L;4": 17}  # of the grey of a PNG with fewer than 8 bits
_ORIENTATION = 0x0112  # EXIF's tag
_TURNS = {  # what makes an image upright, by the tag's value
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def as_shown(image: Image.Image) -> Image.Image:
    """The RGB of a Pillow image as people see it: upright, on white, with its colour profile."""
    turn, profile, storage_mode = _turn(image), image.info.get("icc_profile"), _storage_mode(image)
    flat = _on_white(image.copy(), storage_mode)
    return _in_srgb(flat if turn is None else flat.transpose(turn), profile)


def _turn(image: Image.Image) -> Image.Transpose | None:
    """What makes an image upright; None if it is."""
    try:
        return _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # of damaged metadata; the image itself may be whole
        return None


def _in_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """The RGB of an image by its colour profile, if it has one that can be used."""
    if profile is not None:
        with suppress(ImageCms.PyCMSError, OSError, TypeError, ValueError, ImportError):  # Pillow may be without it
            own_profile, srgb = ImageCms.ImageCmsProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB")
            if "sRGB" not in ImageCms.getProfileDescription(own_profile):
                return ImageCms.profileToProfile(image, own_profile, srgb, outputMode="RGB") or image
    return image.convert("RGB")


# -- transparency and depth --------------------------------------------------------------------------------------------


def _storage_mode(image: Image.Image) -> str:
    """How a PNG's file has its pixels, such as "L;2", before they are read; "" for other files."""
    tiles = image.tile if isinstance(image, ImageFile.ImageFile) and image.format == "PNG" else []
    return next((str(tile.args) for tile in tiles), "")


def _on_white(
    image: Image.Image, storage_mode: str = "", low_bytes: Callable[[], Image.Image] | None = None
) -> Image.Image:
    """A loaded image of any mode on white, as L, RGB or CMYK of 8 bits. storage_mode: see `_stored`. low_bytes: the
    lower bytes of an RGB image of 16 bits, whose higher bytes are its pixels."""
    key = image.info.get("transparency")  # of a PNG or a GIF
    if image.mode.startswith("I;16"):
        data = image.convert("I;16").tobytes()
        high, low = (Image.frombytes("L", image.size, data[at::2]) for at in (1, 0))
        return high if key is None else _replace_color(high, [high], [low], [key])
    if image.mode in ("I", "F"):
        return _to_eight_bits(image)
    if key is not None and storage_mode == "RGB;16B" and low_bytes is not None:
        return _replace_color(image, image.split(), low_bytes().split(), key)
    if key is not None and storage_mode in _FACTORS:
        image.info["transparency"] = key * _FACTORS[storage_mode]
    if image.has_transparency_data:
        rgba, flat = image.convert("RGBA"), Image.new("RGB", image.size, "white")
        alpha = rgba.getchannel("A")
        if image.format == "BMP" and alpha.getextrema() == (0, 0):  # as programs without transparency write it
            return image.convert("RGB")
        flat.paste(rgba, mask=alpha)
        return flat
    if image.mode == "1":
        return image.convert("L")
    return image if image.mode in ("L", "RGB", "CMYK") else image.convert("RGB")


def _replace_color(
    image: Image.Image, high: Sequence[Image.Image], low: Sequence[Image.Image], key: Sequence[int]
) -> Image.Image:
    """An image with white in place of the colour `key`, of 16 bits. high, low: the bytes of its bands."""
    equal = [
        band.point([255 * (value == level) for value in range(256)])
        for each, shift in ((high, 8), (low, 0))
        for band, level in zip(each, (value >> shift & 255 for value in key), strict=True)
    ]
    image.paste("white", mask=reduce(ImageChops.darker, equal))
    return image


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """A grey image of integers or floats, in 8 bits: from 0 to the first of 1 (floats), 255 and 65,535 that all of its
    values fit in, or else from the least value to the largest."""
    least, largest = cast(tuple[float, float], image.getextrema())
    ranges = [most for most in (1, 255, 65535) if largest <= most and (most > 1 or image.mode == "F")]
    start, most = (0, ranges[0]) if ranges and least >= 0 else (least, largest)
    scale = 255 / ((most - start) or 1)
    return image.convert("F").point(lambda value: value * scale + (0.5 - start * scale)).convert("L")


# -- files -------------------------------------------------------------------------------------------------------------


def _answer(most: int, seconds: float, request: dict[str, Any]) -> dict[str, Any]:
    limit_time(seconds)
    try:
        image, profile, note = _upright(base64.b64decode(request["data"]), most)
        if "to" not in request:
            return {"size": image.size}
        _upright.cache_clear()  # an image can be large
        if image.size != tuple(request["to"]):
            image = image.resize(request["to"], Image.Resampling[request["filter"]])
        return {"pixels": base64.b64encode(_in_srgb(image, profile).tobytes()).decode(), "note": note}
    except _Unreadable as error:
        return {"error": str(error)}
    except MemoryError:
        raise
    except Exception:  # decoders raise whatever they stumble over
        return {"error": _DAMAGED_IMAGE}


class _Unreadable(Exception):
    """The message is a sentence that says why an image is not read."""


@lru_cache(maxsize=1)  # callers need the same image twice
def _upright(data: bytes, most: int) -> tuple[Image.Image, bytes | None, str]:
    """(image, colour profile, note) of a file: RGB, or what a profile is for, at its own size. Raises _Unreadable, or
    whatever a decoder raises. most: pixels."""
    try:
        image = _open(data)
    except UnidentifiedImageError:
        raise _Unreadable(f"this is no image of a kind that is read ({', '.join(FORMATS)})") from None
    width, height = image.size
    if width * height > most:
        raise _Unreadable(f"this image has {width:,} by {height:,} pixels, and at most {most:,} are read")
    profile = image.info.get("icc_profile")
    flat, note = _decode(image, data)
    turn = _turn(image)
    if profile is None:
        flat = flat.convert("RGB")
    return flat if turn is None else flat.transpose(turn), profile, note


def _open(data: bytes, filler: int = 0) -> Image.Image:
    """The image of a file, whose pixels are not read yet. filler: the value of bytes that a WebP file lacks, which is
    decoded as a whole or not at all."""
    return Image.open(io.BytesIO(data + bytes([filler]) * _missing_bytes(data)), formats=FORMATS)


def _missing_bytes(data: bytes) -> int:
    """How many bytes are cut off the end of a WebP file, unless that is more than the half of it."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return 0
    count = int.from_bytes(data[4:8], "little") + 8 - len(data)
    return count if 0 < count <= len(data) else 0


def _decode(image: Image.Image, data: bytes) -> tuple[Image.Image, str]:
    """The image of the file `data` on white, and a note. Raises _Unreadable, or whatever a decoder raises."""
    storage_mode, low_bytes, note = _storage_mode(image), partial(_low_bytes, data), ""
    try:
        if _missing_bytes(data):
            raise OSError
        if image.format in ("GIF", "PNG", "WEBP") and getattr(image, "is_animated", False):
            note = _ANIMATED
        image.load()
    except MemoryError:
        raise
    except Exception:  # decoders raise whatever they stumble over
        image, lost_pixels = _decode_partly(data)
        flat = _on_white(image, storage_mode)
        if lost_pixels is not None:
            flat = flat.convert("RGB")
            flat.paste("white", mask=lost_pixels)
        return flat, _CUT
    if getattr(image, "default_image", False):  # of an animated PNG: a still image for programs without animations
        image.paste(0 if image.has_transparency_data else 255, (0, 0, *image.size))
        image.seek(1)
        cast(PngImageFile, image).blend_op = Blend.OP_SOURCE  # nothing is below it
        image.load()
    flat = _on_white(image, storage_mode, low_bytes)
    if isinstance(image, GifImageFile) and (place := image.dispose_extent) != (0, 0, *image.size):
        first, flat = flat.crop(place), Image.new("RGB", image.size, "white")
        flat.paste(first, place)
    return flat, note


def _low_bytes(data: bytes) -> Image.Image:
    """The lower bytes of a PNG of 16 bits, which Pillow reads as the upper ones of little-endian values."""
    image = cast(ImageFile.ImageFile, _open(data))
    image.tile = [tile._replace(args="RGB;16L") for tile in image.tile]
    image.load()
    return image


def _decode_partly(data: bytes) -> tuple[Image.Image, Image.Image | None]:
    """The image of a file that is cut off or damaged, and a mask of the pixels that it lacks: they differ if it is
    continued with other bytes and decoded on another ground. Of a JPEG, whose rest becomes grey, they are not known.
    Raises _Unreadable."""
    images: list[Image.Image] = []
    ImageFile.LOAD_TRUNCATED_IMAGES = True
    try:
        for filler in _FILLERS:
            with suppress(OSError, EOFError, ValueError, SyntaxError):
                images.append(_decode_padded(data, filler))
            if len(images) == 2:
                break
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = False
    if len(images) < 2:
        raise _Unreadable(_DAMAGED_IMAGE)
    if images[0].format in _JPEG:
        if images[0].convert("RGB").getextrema() == _GREY:
            raise _Unreadable(_DAMAGED_IMAGE)
        return images[0], None
    bands = ImageChops.difference(*map(_values, images)).split()
    lost_pixels = reduce(ImageChops.lighter, bands).point([0] + [255] * 255)
    if lost_pixels.histogram()[255] > _MOST_LOST * lost_pixels.width * lost_pixels.height:
        raise _Unreadable(_DAMAGED_IMAGE)
    return images[0], lost_pixels


def _decode_padded(data: bytes, filler: int) -> Image.Image:
    """The image of a file whose end is made up. Raises whatever a decoder raises."""
    image = _open(data, filler)
    if image.format in _JPEG:
        image = _open(data + b"\xff\xd9")  # its end
    elif image.format == "GIF":
        image = _open(data + bytes([filler]) * _GIF_BLOCK)
    if image.format in ("PNG", "GIF", "BMP"):
        image.im = Image.new(image.mode, image.size, filler).im
    image.load()
    return image


def _values(image: Image.Image) -> Image.Image:
    """What two images are compared by."""
    if image.mode == "P":
        return Image.frombytes("L", image.size, image.tobytes())
    return image.convert("L") if image.mode in ("1", "I;16") else image


def _begin(first: tuple[int, float]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    Image.MAX_IMAGE_PIXELS = None  # checked above
    Image.init()  # imports its modules before the time of a file begins
    return partial(_answer, *first)


if __name__ == "__main__":
    answer_lines(_begin, MEMORY_BYTES)
