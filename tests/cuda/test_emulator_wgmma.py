"""The emulator finds what is missing in a kernel with products of warpgroups: waits, fences, barriers, addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from polarlm.engine.backends.cuda import launch_configs
from polarlm.engine.backends.cuda.device.kernel_source import source
from tests.cuda import test_prefill_attention
from tests.cuda.test_prefill_wgmma import attend, case
from tests.cuda_emulator import EmulatorError, Program, Traffic

# Name → what of prefill_wgmma is taken out or changed, and what is said of it; "off by" is the word of the comparison
# with float64. Of a prompt of several parts, a product that nothing waits for finds its slot taken.
MUTATIONS = {
    "no wait for values": ("        wgmma_wait<0>();\n", "", "race|not been waited for"),
    "no wait for scores": ("    wgmma_wait<GROUPS_LEFT>();\n", "", "race|not been waited for"),
    "too short a wait": ("        wait<1>(scores);", "        wait<2>(scores);", "sums of a product have changed"),
    "no commit": (
        "        wgmma_commit();\n        start_stage",
        "        start_stage",
        "have changed|not been waited for",
    ),
    "no fence of registers": ("    keep_here(scores);\n    wgmma_fence();\n", "", "without a wgmma_fence"),
    "no fence of the proxy": ("        fence_async_proxy();\n", "", "no fence.proxy.async after the store"),
    "a fence behind the barrier": (
        "        fence_async_proxy();\n        __syncthreads();\n",
        "        __syncthreads();\n        fence_async_proxy();\n",
        "no fence.proxy.async after the store",
    ),
    "no barrier": ("        __syncthreads();\n    };", "    };", "race|not been waited for|uninitialised"),
    "copies are not waited for": (
        "        cp_async_wait<SLOTS - 2>();\n        take",
        "        take",
        "not been waited for",
    ),
    "the newest copies are": (
        "        cp_async_wait<SLOTS - 2>();",
        "        cp_async_wait<SLOTS - 1>();",
        "not been waited for",
    ),
    "a slot in use": ("start_stage(n + SLOTS - 1)", "start_stage(n + SLOTS)", "race|not been waited for|off by"),
    "a slot before the barrier": (
        "        cp_async_wait<SLOTS - 2>();\n        take_stage();",
        "        cp_async_wait<SLOTS - 2>();\n        start_stage(n + SLOTS - 1);\n        take_stage();",
        "race|not been waited for|no fence",
    ),
    "no swizzle": ("(byte ^ column % 8 * 16)", "byte", "off by"),
    "half a swizzle": ("(byte ^ column % 8 * 16)", "(byte ^ column % 4 * 16)", "off by"),
    "the swizzle of 64 bytes": ("1ull << 62", "2ull << 62", "off by"),
    "none in the descriptor": ("1ull << 62", "0ull << 62", "off by|outside of dynamic shared memory|uninitialised"),
    "patterns too near": ("(PATTERN_BYTES / 16) << 32", "(PATTERN_BYTES / 32) << 32", "off by"),
    "rings anywhere": ("(0u - shared_address(shared)) % PATTERN_BYTES", "0", "off by"),
    "another order of channels": ("tg / 2 * 2 + tg % 2 * 8 + r * 4", "tg * 2 + r * 8", "off by"),
    "weights change under way": (
        "        state.wait_for_values();\n        state.take(scores);\n    }",
        "        state.take(scores);\n    }",
        "race|changed|not been waited for",
    ),
    "weights of the first part": ("        state.take(scores);\n    }", "    }", "off by"),
    "sums change behind the fence": (
        "        score(scores, queries, keys_of(n));",
        "        scores[0] = 1;\n        score(scores, queries, keys_of(n));",
        "sums have changed since the last wgmma_fence",
    ),
    "values behind the newest": ("    if (start + PART - 1 > newest) clear", "    if (false) clear", "off by.* nan"),
}


def attend_with(rng: np.random.Generator, length: int, rows: int, dim: int, old: str, new: str) -> None:
    """Attention by the kernel with `new` in the place of `old`. AssertionError where the result is wrong."""
    paged, q = case(rng, length, rows, dim)
    layouts = paged.key_layout, paged.value_layout
    config, _ = launch_configs.prefill_wgmma(*layouts, 1)
    text = source("prefill_wgmma", *layouts, **config.defines)
    assert text.count(old) == 1, "one place"
    paged.assert_attention(attend(paged, q, text=text.replace(old, new)), q[:, :-1])


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("name", MUTATIONS)
def test_every_wait_fence_and_address_counts(rng: np.random.Generator, name: str) -> None:
    """Without one of them the emulator stops, or results are wrong."""
    old, new, words = MUTATIONS[name]
    with pytest.raises((EmulatorError, AssertionError), match=words):
        attend_with(rng, 300, 140, 128, old, new)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("name", "words"),
    [("no wait for scores", "sums of a product have changed"), ("no wait for values", "under way")],
)
def test_sums_are_not_there_before_they_are_waited_for(rng: np.random.Generator, name: str, words: str) -> None:
    """Of a prompt of few parts, what the products read is there for as long as they need it."""
    with pytest.raises(EmulatorError, match=words):
        attend_with(rng, 100, 20, 64, *MUTATIONS[name][:2])


class _Counting:
    """A program that counts what it copies: to shared memory, and from blocks of keys and values."""

    def __init__(self, text: str) -> None:
        self._program = Program(text)
        self.copies: Sequence[Traffic] = []

    def launch(self, name: str, grid: Any, block: Any, *args: Any, shared: int, seed: int) -> None:
        counted = self._program.traffic(name, grid, block, *args, shared=shared)
        copying = {row.place for row in counted if row.is_shared}
        self.copies = [row for row in counted if row.place in copying]


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
def test_copies_meet_no_bank_twice_and_read_whole_sectors(
    rng: np.random.Generator, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs: list[_Counting] = []
    monkeypatch.setattr(
        test_prefill_attention, "_program", lambda text: programs.append(_Counting(text)) or programs[0]
    )
    attend(*case(rng, 256, 256, dim))
    copies = programs[0].copies
    assert len(copies) == 4  # of keys and of values: reads and writes
    assert all(row.used == row.least for row in copies)
