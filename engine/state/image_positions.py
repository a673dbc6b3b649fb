"""Where the images of a sequence are, and the positions that RoPE gives its tokens, which images let lag behind.

In models whose RoPE has sections, a token has three positions: in time, in height and in width. A text token has the
same number three times. The rows of an image have the number of its first row in time, and count from there in height
and in width; the text after it goes on with the largest of them, plus one (Qwen2-VL, arXiv:2409.12191, section 2.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

IMAGE_IDS = 1 << 62
"""The ids that stand for images' rows begin here, and end below twice this number; tokens have smaller ids."""


@dataclass(frozen=True)
class ImagePositions:
    """images: the positions of each image's rows in the sequence, in order. rope_positions (3, n): the positions for
    RoPE, in time, height and width, of all tokens up to the end of the last image; None: every token's position is its
    own."""

    images: tuple[range, ...]
    rope_positions: np.ndarray | None = None

    @classmethod
    def from_grids(cls, images: Sequence[range], grids: Sequence[tuple[int, int]], *, sections: bool) -> ImagePositions:
        """grids: (height, width) of each image's rows. sections: whether RoPE has sections."""
        if not sections:
            return cls(tuple(images))
        rope_positions, end, after = [], 0, 0  # after: what the token at `end` gets
        for rows, (height, width) in zip(images, grids, strict=True):
            text = np.arange(rows.start - end) + after
            after += len(text)
            down, right = np.divmod(np.arange(len(rows)), width)
            rope_positions += [np.stack([text] * 3), np.stack([np.zeros_like(down), down, right]) + after]
            end, after = rows.stop, after + max(height, width)
        return cls(tuple(images), np.concatenate(rope_positions, axis=1))

    def parts(self, start: int, count: int) -> list[tuple[range, int]]:
        """Return `count` positions from `start` on, cut where images begin and end, and the last position of the image
        that a part is in, or 0."""
        edges = {edge for image in self.images for edge in (image.start, image.stop) if start < edge < start + count}
        parts = (range(first, end) for first, end in pairwise([start, *sorted(edges), start + count]))
        return [(part, next((image[-1] for image in self.images if part.start in image), 0)) for part in parts]

    def cut(self, rows: slice, position: int) -> Iterator[tuple[slice, int, int]]:
        """Yield the parts of rows, the first at `position`, between ends of images: rows, position, and as `parts`."""
        shift = rows.start - position
        for part, sees in self.parts(position, rows.stop - rows.start):
            yield slice(part.start + shift, part.stop + shift), part.start, sees

    def positions(self, start: int, count: int) -> np.ndarray:
        """Return the positions for RoPE of `count` tokens from `start` on: (count,), or (3, count) if an image is among
        them."""
        indices = np.arange(start, start + count)
        if self.rope_positions is None:
            return indices
        of_images = self.rope_positions[:, start : start + count]
        lag = self.rope_positions.shape[1] - 1 - self.rope_positions.max()
        if not of_images.shape[1]:
            return indices - lag
        return np.concatenate(
            [of_images, np.broadcast_to(indices[of_images.shape[1] :] - lag, (3, count - of_images.shape[1]))], axis=1
        )
