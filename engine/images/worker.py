"""Tells its parent process what is in the files of images: JSON lines in, JSON lines out.

A file can be made to take any time or memory, or to use a fault of a decoder, so it is decoded here, with limits of
both. The first line has the most pixels of an image. Each further line is a request: {"data": the file in base64} is
answered by {"size": [width, height]} of the upright image; with "to" ([width, height]) and "filter" by {"pixels": its
pixels in base64, uint8 (height, width, 3), scaled}; and {"error": a sentence} by both. This file imports none of
the rooms.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from functools import partial
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from polarlm.children import answer_lines

MEMORY_BYTES = 2 << 30  # address space
SECONDS = 20.0  # of processor time for a file
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # EXIF's tag, and its values for an image that lies on a side


def _answer(most: int, request: dict[str, Any]) -> dict[str, Any]:
    try:
        with Image.open(io.BytesIO(base64.b64decode(request["data"])), formats=FORMATS) as image:
            width, height = image.size
            if width * height > most:
                return {"error": f"this image has {width:,} by {height:,} pixels, and at most {most:,} are read"}
            try:
                orientation = image.getexif().get(_ORIENTATION)
            except Exception:  # the image itself may be whole
                orientation = None
            if "to" not in request:
                return {"size": [height, width] if orientation in _TURNED else [width, height]}
            pixels = (image if orientation is None else ImageOps.exif_transpose(image)).convert("RGB")
            if pixels.size != tuple(request["to"]):
                pixels = pixels.resize(request["to"], Image.Resampling[request["filter"]])
            return {"pixels": base64.b64encode(pixels.tobytes()).decode()}
    except UnidentifiedImageError:
        return {"error": f"this is no image of a kind that is read ({', '.join(FORMATS)})"}
    except MemoryError:
        raise
    except Exception:  # decoders raise whatever they stumble over
        return {"error": "this image is damaged"}


def _begin(most: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    Image.MAX_IMAGE_PIXELS = None  # checked above
    return partial(_answer, most)


if __name__ == "__main__":
    answer_lines(_begin, MEMORY_BYTES, SECONDS)
