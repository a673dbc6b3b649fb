"""Memory of a prompt in layers whose states are matrices, besides their slots in the KV store.

Letters as in `engine.backends.delta`.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from polarlm.engine.backends.cuda.recurrent.sizes import PROMPT_ROWS, sizes_of
from polarlm.model_loaders.config import Recurrent

_FLOAT = 4
_STEP = 4  # of the distances between ends of blocks whose states are kept: see `state.recurrent.delta.ends_to_keep`


def heads_width(mixer: Recurrent) -> int:
    """H·D."""
    return mixer.value_heads * mixer.value_dim


def projected_columns(mixer: Recurrent) -> int:
    """Columns of a projected row, at most: q, k, v, z, b, a; or z, x, B, C, dt."""
    return mixer.channels + heads_width(mixer) + 2 * mixer.value_heads


def delta_prompt_bytes(mixers: Collection[Recurrent], chunk: int, tokens: int, block_size: int) -> tuple[int, int, int]:
    """Return bytes of what one part of a prompt writes for the next kernel, of states that are computed at a time, and
    of states that are kept at a layer's end."""
    blocks = tokens // block_size
    ends = 2 + sum(_STEP**power < blocks for power in range(1, 16)) if blocks else 0
    parts, states, kept = [0], [], [0]
    for mixer in mixers:
        count = min(-(-chunk // block_size) + 1, PROMPT_ROWS // block_size)
        parts.append(_numbers(sizes_of(mixer, block_size).scratch(mixer.key_heads, mixer.value_heads, count)))
        matrices, before = mixer.value_heads * mixer.key_dim * mixer.value_dim, (mixer.width - 1) * mixer.channels
        of_tokens = mixer.key_heads * mixer.key_dim + mixer.value_heads * (mixer.value_dim + 1) + mixer.channels
        states.append((1 + ends) * (matrices + before) + block_size * of_tokens)
        kept.append(ends * (matrices + before))
    return _FLOAT * max(parts), _FLOAT * sum(states), _FLOAT * max(kept)


def _numbers(shapes: Collection[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))
