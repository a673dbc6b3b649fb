"""Tiles made of sections of a codec's streams."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from polarlm.engine.codecs import Codec
from polarlm.engine.codecs.schema.planes import Planes
from polarlm.engine.codecs.schema.sections import Section, Sections, arrange, numbered
from polarlm.engine.codecs.schema.streams import Stream, pack, unpack


class SectionTiles:
    """A tile's bytes: its sections, padded with zeros to a multiple of 64."""

    def __init__(self, name: str, codec: Codec, block_size: int, head_dim: int, *sections: Section) -> None:
        self.name, self._schema = f"{name}_{block_size}_{head_dim}", codec.schema(block_size, head_dim)
        self._sections = Sections(sections, alignment=1, line=64)
        self.nbytes = self._sections.nbytes

    def pack(self, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        return self._sections.pack(self.from_streams(unpack(self._schema, fields)))

    def unpack(self, tiles: np.ndarray) -> dict[str, np.ndarray]:
        return pack(self._schema, self.to_streams(self._sections.unpack(tiles)))

    def from_streams(self, streams: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The codec's streams → the sections' streams."""
        return streams

    def to_streams(self, stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The inverse of `from_streams`."""
        return stored


def codes_section(
    name: str, stream: Stream, planes: Planes | None, cuts: Sequence[tuple[int, ...]], order: Sequence[int]
) -> Section:
    """A section of codes in the order of `arrange`: vectors of 64 in bit planes, or bytes if `planes` is None."""
    width = 64 if planes else math.prod(math.prod(pieces) for pieces in cuts)
    return Section(name, stream, arrange(numbered(*stream.shape), cuts, order).reshape(1, -1, width), planes)
