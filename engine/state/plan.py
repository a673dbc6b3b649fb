"""Plans the size of the KV store, for a context or for the memory that there is. Allocates nothing."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import partial

from polarlm.engine.codecs import FULL
from polarlm.engine.config import format_bytes
from polarlm.engine.errors import EngineError
from polarlm.engine.state.shapes import CacheShape

_SPARE_SLOTS = 1  # a prompt's span holds the slot of the block that it completes until commit


@dataclass(frozen=True)
class StorePlan:
    """The size of a store: for one sequence of `tokens` or several shorter ones, and for further ones that are kept."""

    shape: CacheShape
    tokens: int
    quantized_blocks: tuple[int, ...]  # per group
    full_slots: int  # slots of K/V for first and current blocks; see `StateShape.slots`
    more_slots: int = 0  # slots of further sequences that are kept
    more_tokens: int = 0  # tokens of further sequences that are kept
    recent_slots: int = 0  # slots for recent blocks, which all sequences share

    @property
    def bytes(self) -> int:
        """Bytes of the store in the device's memory."""
        return self.shape.bytes(self.quantized_blocks, self.full_slots, self.more_slots, self.recent_slots)

    def layer_bytes(self, layers: Container[int]) -> int:
        return self.shape.bytes(self.quantized_blocks, self.full_slots, self.more_slots, self.recent_slots, layers)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of snapshots, which are in the computer's memory: with a GPU in addition to `bytes`, and else among
        them."""
        return self.shape.snapshot_bytes(self.quantized_blocks)

    @property
    def copy_bytes(self) -> int:
        """Most bytes of copies of preempted requests in the computer's memory: as snapshots, or half as the store."""
        return self.snapshot_bytes or self.bytes // 2

    @property
    def capacity(self) -> int:
        """The tokens of all sequences that fit, if these are long."""
        return self.tokens + self.more_tokens

    def extend(self, more_slots: int, more_tokens: int) -> StorePlan:
        """Return the plan with room for further sequences that are kept."""
        blocks = _quantized_blocks(self.shape, self.tokens, self.full_slots, more_slots, more_tokens)
        return replace(self, quantized_blocks=blocks, more_slots=more_slots, more_tokens=more_tokens)

    def sequences(self, tokens: int) -> int:
        """Return how many sequences of `tokens` the store can always hold at once, in whatever order they grow."""
        needed = zip(self.quantized_blocks, self.shape.quantized_blocks(tokens), strict=True)
        slots = (self.full_slots - _SPARE_SLOTS) // 2
        return min([slots, *(blocks // each for blocks, each in needed if each)])


def plan_for_tokens(shape: CacheShape, tokens: int, sequences: int, *, running: int | None = None) -> StorePlan:
    """Return the smallest store with quantized blocks for a sequence of `tokens`, and slots for the first and the
    current block of `sequences`. running: how many have all their recent blocks at once; None for all."""
    slots = 2 * sequences + _SPARE_SLOTS
    blocks = _quantized_blocks(shape, tokens, slots)
    recent = shape.recent_blocks * (sequences if running is None else running)
    return StorePlan(shape, tokens, blocks, slots, recent_slots=recent)


def _quantized_blocks(
    shape: CacheShape, tokens: int, slots: int, more_slots: int = 0, more_tokens: int = 0
) -> tuple[int, ...]:
    """Return the quantized blocks of a store, per group, for a sequence of `tokens` and for more sequences that are no
    longer."""
    whole, rest = divmod(more_tokens, max(1, tokens))
    each, last = shape.quantized_blocks(tokens), shape.quantized_blocks(rest)
    more_blocks = shape.more_blocks(slots, more_slots)
    return tuple((1 + whole) * a + b + c for a, b, c in zip(each, last, more_blocks, strict=True))


def plan_for_memory(
    shape: CacheShape,
    memory: int,
    max_tokens: int,
    sequences: int,
    other_bytes: Callable[[int], int] = lambda tokens: 0,
    *,
    running: int | None = None,
) -> StorePlan:
    """Return the store for the longest sequence, up to `max_tokens`, that fits into `memory` bytes.

    other_bytes: tokens of a sequence → bytes of `memory` that other things need; must not decrease. sequences: how many
    get full-precision slots; fewer if these would take more than a quarter of `memory`. As many recent blocks get
    slots, from those of one sequence to those of `running` ones, as fit into that quarter, too, and beside the longest
    sequence; fewer only where two blocks leave no room. Raises EngineError ("out_of_memory") if two blocks do not fit.
    """

    def slots(sequences: int) -> int:
        return plan_for_tokens(shape, 0, sequences, running=0).bytes

    sequences = max(1, bisect_right(range(1, sequences + 1), memory // 4, key=slots))
    recent = shape.recent_blocks * min(running or sequences, sequences)

    def plan(tokens: int) -> StorePlan:
        return replace(plan_for_tokens(shape, tokens, sequences), recent_slots=recent)

    least, whole = plan(min(max_tokens, 2 * shape.block_size)), plan(max_tokens)
    room = memory - other_bytes(least.tokens)
    fewest = _most_recent(least, shape.recent_blocks, room)
    for part, limit in ((plan(0), memory // 4), (whole, memory - other_bytes(max_tokens))):
        recent = max(fewest, _most_recent(part, recent, limit))

    least = plan(least.tokens)
    if least.bytes > room:
        snapshots = 0 if shape.has_host else least.snapshot_bytes
        if least.bytes - snapshots <= room:
            raise EngineError(
                f"{format_bytes(snapshots)} for snapshots of recurrent layers are too much: there is room for "
                f"{format_bytes(room - least.bytes + snapshots)}; give a smaller state_cache, raise kv_memory, or free "
                "some memory",
                "out_of_memory",
                ("state_cache", "kv_memory"),
            )
        raise EngineError(
            f"{format_bytes(max(0, room))} for the KV store is too little for this model: the first blocks alone take "
            f"{format_bytes(least.bytes)}; raise kv_memory, or free some memory",
            "out_of_memory",
            ("kv_memory",),
        )
    longer = range(least.tokens + 1, max_tokens + 1)
    tokens = least.tokens + bisect_right(longer, memory, key=lambda count: plan(count).bytes + other_bytes(count))
    return plan(tokens)


def _most_recent(plan: StorePlan, most: int, memory: int) -> int:
    """Return how many slots of recent blocks, up to `most`, a plan has that takes `memory` bytes."""
    return bisect_right(range(1, most + 1), memory, key=lambda count: replace(plan, recent_slots=count).bytes)


def common_plan(shape: CacheShape, plans: Sequence[StorePlan]) -> StorePlan:
    """Return the plan for all layers of `shape` that takes no more of any of its parts than `plans`, one for each."""
    tokens, slots = min(plan.tokens for plan in plans), min(plan.full_slots for plan in plans)
    more_slots, more_tokens = min(plan.more_slots for plan in plans), min(plan.more_tokens for plan in plans)
    recent = min(plan.recent_slots for plan in plans)
    return StorePlan(shape, tokens, (), slots, recent_slots=recent).extend(more_slots, more_tokens)


def add_kept(plan: StorePlan, memory: int, tokens_each: int) -> StorePlan:
    """Return `plan` with room for further sequences that are kept, as many as fit into `memory` bytes.

    tokens_each: the tokens of each for which there are blocks; 0 if they share the plan's blocks. What is left becomes
    blocks, too: a shorter sequence if at least half of one fits, with its slots; else more tokens of the others.
    """

    if not plan.shape.kv_layers:  # nothing is kept
        return plan
    most = 1
    while plan.extend(2 * most, most * tokens_each).bytes <= memory:
        most *= 2
    count = bisect_right(range(1, most), memory, key=lambda count: plan.extend(2 * count, count * tokens_each).bytes)
    whole, tokens = plan.extend(2 * count, count * tokens_each), count * tokens_each
    if not tokens_each or plan.bytes > memory:
        return whole
    shorter = plan.extend(2 * (count + 1), tokens + tokens_each // 2)
    return _add_tokens(shorter if shorter.bytes <= memory else whole, memory)


def _add_tokens(plan: StorePlan, memory: int) -> StorePlan:
    """Return `plan` with quantized blocks for more tokens, as many as fit into `memory` bytes; `plan` itself if these
    take none."""
    extend = partial(plan.extend, plan.more_slots)
    if extend(plan.more_tokens + plan.tokens).bytes == plan.bytes:  # a whole context is in full precision
        return plan
    longer = range(plan.more_tokens + 1, (memory + 1) * plan.tokens)  # each context takes a byte at least
    return extend(plan.more_tokens + bisect_right(longer, memory, key=lambda tokens: extend(tokens).bytes))


def f16_tokens(plan: StorePlan) -> int:
    """Return how many tokens, up to the plan's, an f16 cache would hold in the memory of `plan`."""
    f16, slots, more = plan.shape.as_type(FULL), plan.full_slots, plan.more_slots

    def size(tokens: int) -> int:
        first = min(tokens, plan.tokens)
        return f16.bytes(_quantized_blocks(f16, first, slots, more, tokens - first), slots, more, plan.recent_slots)

    return bisect_right(range(1, plan.capacity + 1), plan.bytes, key=size)


def reserved_text(store: int, context: float) -> str:
    """Return the bytes of a store in words, with what it has beside the bytes that its whole context takes."""
    room = format_bytes(max(0, store - context))
    return f"{format_bytes(store)} reserved, with {room} of room for recent tokens and further conversations"
