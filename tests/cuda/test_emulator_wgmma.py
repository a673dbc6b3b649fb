"""The emulator finds what is missing in a kernel with products of warpgroups: waits, fences, barriers, addresses."""

from __future__ import annotations

import numpy as np
import pytest

from polarlm.engine.backends.cuda import launch_configs
from polarlm.engine.backends.cuda.device.kernel_source import source
from tests.cuda.test_prefill_wgmma import attend, case
from tests.cuda_emulator import EmulatorError

# What is taken out of prefill_wgmma or changed, and what is said of it; "off by" is the word of the comparison with
# float64.
MUTATIONS = [
    ("        wgmma_wait<0>();\n", "", "have changed|not been waited for"),
    ("    wgmma_wait<GROUPS_LEFT>();\n", "", "have changed|not been waited for"),
    ("wait<1>(scores);\n        state.weigh", "wait<2>(scores);\n        state.weigh", "have changed"),
    ("    keep_here(scores);\n    wgmma_fence();\n", "", "without a wgmma_fence"),
    ("        fence_async_proxy();\n", "", "no fence.proxy.async after the store"),
    (
        "        fence_async_proxy();\n        __syncthreads();\n",
        "        __syncthreads();\n        fence_async_proxy();\n",
        "no fence.proxy.async after the store",
    ),
    ("        __syncthreads();\n        start_stage", "        start_stage", "race|not been waited for|uninitialised"),
    ("        cp_async_wait<SLOTS - 2>();\n        next", "        next", "not been waited for"),
    ("cp_async_wait<SLOTS - 2>();\n        next", "cp_async_wait<SLOTS - 1>();\n        next", "not been waited for"),
    ("start_stage(n + SLOTS - 1)", "start_stage(n + SLOTS)", "race|waited for|off by|uninitialised"),
    ("(byte ^ column % 8 * 16)", "byte", "off by"),
    ("(byte ^ column % 8 * 16)", "(byte ^ column % 4 * 16)", "off by"),
    ("1ull << 62", "2ull << 62", "off by"),
    ("1ull << 62", "0ull << 62", "off by|outside of dynamic shared memory|uninitialised"),
    ("(PATTERN_BYTES / 16) << 32", "(PATTERN_BYTES / 32) << 32", "off by"),
    ("(0u - shared_address(shared)) % PATTERN_BYTES", "0", "off by"),
    ("tg / 2 * 2 + tg % 2 * 8 + r * 4", "tg * 2 + r * 8", "off by"),
    (
        "        state.wait_for_values();\n        state.take(scores);\n    }",
        "        state.take(scores);\n    }",
        "changed|not been waited for",
    ),
    ("        state.take(scores);\n    }", "    }", "off by"),
    (
        "        score(scores, queries, keys_of(n));",
        "        scores[0] = 1;\n        score(scores, queries, keys_of(n));",
        "sums have changed since the last wgmma_fence",
    ),
    ("    if (start + PART - 1 > newest) clear_values", "    if (false) clear_values", "off by nan|off by up to nan"),
]


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize(("old", "new", "words"), MUTATIONS)
def test_every_wait_fence_and_address_counts(rng: np.random.Generator, old: str, new: str, words: str) -> None:
    """Without one of them the emulator stops, or results are wrong."""
    paged, q = case(rng, 300, 140, 128)
    layouts = paged.key_layout, paged.value_layout
    config, _ = launch_configs.prefill_wgmma(*layouts, 1)
    text = source("prefill_wgmma", *layouts, **config.defines)
    assert text.count(old) == 1
    with pytest.raises((EmulatorError, AssertionError), match=words):
        paged.assert_attention(attend(paged, q, text=text.replace(old, new)), q[:, :-1])


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("        wgmma_wait<0>();\n", "", "under way"),
        ("    wgmma_wait<GROUPS_LEFT>();\n", "", "sums of a product have changed"),
        ("wait<1>(s", "wait<2>(s", "changed"),
    ],
)
def test_sums_are_not_there_before_they_are_waited_for(
    rng: np.random.Generator, old: str, new: str, words: str
) -> None:
    """Where what the products read is still there when they are computed."""
    paged, q = case(rng, 100, 20, 64)
    layouts = paged.key_layout, paged.value_layout
    config, _ = launch_configs.prefill_wgmma(*layouts, 1)
    text = source("prefill_wgmma", *layouts, **config.defines)
    with pytest.raises(EmulatorError, match=words):
        attend(paged, q, text=text.replace(old, new))
