"""The picture of the cache: blocks in full precision, coded and shared, which move with the answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.page.visitor import Page, stats, usage
from tests.server.process import SMALL_BLOCKS, Process
from tests.tiny import PLAIN, load_tiny

pytestmark = pytest.mark.slow


def blocks(
    page: Page, tokens: int, cached: int, length: int, window: int | None = None, recent: int = 0
) -> dict[str, Any]:
    stats = {"block_size": length, "window": window, "recent_blocks": recent}
    return page.run("return blocksOf(...arguments)", tokens, cached, stats)


def test_blocks_are_counted_from_tokens(page: Page) -> None:
    for tokens, cached, full, coded, shared in [
        (0, 0, 0, 0, 0),
        (64, 0, 1, 0, 0),
        (65, 64, 2, 0, 1),
        (128, 0, 1, 1, 0),
        (700, 460, 2, 9, 7),
    ]:
        counts = blocks(page, tokens, cached, 64)
        assert [counts[name] for name in ("full", "coded", "shared", "all")] == [full, coded, shared, full + coded]
    seen = blocks(page, 700, 0, 64, 128)  # with a window
    assert (seen["first"], seen["full"], seen["coded"]) == (8, 1, 2)
    recent = [blocks(page, tokens, 0, 64, recent=4) for tokens in (130, 700)]
    assert [(seen["full"], seen["coded"]) for seen in recent] == [(3, 0), (6, 5)]


def test_the_engine_holds_as_many_bytes_as_these_blocks_take(page: Page, tiny_path: Path) -> None:
    with load_tiny(tiny_path, **PLAIN | {"cache_type": "compact"}) as engine:
        shape = engine.cache_shape
    layers = range(len(shape.layers))
    for tokens in (0, 1, 7, 8, 9, 16, 17, 24, 50):
        counts = blocks(page, tokens, 0, shape.block_size, recent=shape.recent_blocks)
        taken = counts["coded"] * shape.quantized_bytes(layers) + counts["full"] * shape.full_bytes(layers)
        assert taken == shape.sequence_bytes(tokens)


def test_it_moves_with_the_answer_and_is_what_the_engine_tells(
    visit: Callable[[Process], Page], tiny_path: Path, tmp_path: Path
) -> None:
    prelude = SMALL_BLOCKS.format(kept=4)
    with Process(tiny_path, tmp_path, troubled=True, prelude=prelude) as server:
        page = visit(server)
        page.until(lambda: "bits/value" in page.text("#bits"))
        assert stats(server, 0)["block_size"] == 8
        recent = stats(server, 0)["recent_blocks"]
        page.choose(temperature=0, max_tokens=60)
        page.run(
            """
            const words = document.getElementById("blocks-say");
            window.seen = [];
            new MutationObserver(() => window.seen.push(words.textContent)).observe(words, {childList: true});
            """
        )
        page.send_and_wait("the rain " * 12)
        assert len(set(page.run("return window.seen"))) > 1
        expected = blocks(page, page.run("return contextUse.tokens"), 0, 8, recent=recent)
        assert page.text("#blocks-say").startswith(f"{expected['all']} blocks of 8 tokens: {expected['full']} in full")
        assert "shared" not in page.text("#blocks-say")
        page.click("#new")
        page.send_and_wait("the rain " * 12)
        shared = re.search(r"(\d+) shared", page.text("#blocks-say"))
        assert int(shared[1]) == page.run("return rows.at(-1).message.usage.cached") // 8 > 1


def test_every_block_has_a_cell_up_to_a_long_context(page: Page) -> None:
    script = """
        const [tokens, context] = arguments, length = 64;
        drawnState = "";
        const stats = {block_size: length, window: null, recent_blocks: 4};
        drawBlocks(blocksOf(tokens, tokens / 2, stats), {bits_per_value: 4, context});
        const cells = (path) => path.getAttribute("d").split("M").length - 1;
        const counted = [...document.querySelectorAll("#blocks path")].map(cells);
        const [, , width, height] = document.getElementById("blocks").getAttribute("viewBox").split(" ").map(Number);
        return [counted, height / width];
    """
    for tokens, cells in ((1000, 16), (8000, 125), (131072, 2048)):
        counted, ratio = page.run(script, tokens, 131072)
        free, apart, shared, filled_own, filled_shared = counted
        assert apart + shared == filled_own + filled_shared == cells
        assert shared == int(tokens / 2) // 64
        assert free < 2 * 264 / 5
        assert ratio < 1.1
    counted, _ = page.run(script, 1 << 20, 1 << 20)  # a cell stands for several blocks
    assert 2000 < counted[1] + counted[2] <= 2640


def test_what_is_shared_is_seen_while_the_prompt_is_computed(page: Page) -> None:
    progress = {"total": 640, "cache": 320, "processed": 384, "time_ms": 5}
    page.says([{"event": {"choices": [], "prompt_progress": progress}}, {"wait": 60000}])
    page.send("go")
    page.until(lambda: "shared" in page.text("#blocks-say"))
    assert page.text("#blocks-say") == (
        "6 blocks of 64 tokens: 5 in full precision, 1 coded (4.1 bits), 5 shared with an earlier prompt"
    )
    assert page.text("#progress") == "384 of 640 tokens"


def test_a_server_that_hides_what_is_cached_shows_no_block_as_shared(page: Page) -> None:
    page.says(["one", usage(300, 20, prompt_tokens_details=None)])
    page.send_and_wait("go")
    assert page.text("#blocks-say") == "5 blocks of 64 tokens: all in full precision"
    assert page.figures().startswith("300 prompt tokens · 20 tokens")


def test_a_prompt_that_was_read_again_says_why(page: Page) -> None:
    reread = {"tokens": 1249, "cached": 17, "places": ["messages[0].content (system)"], "before": "a", "now": "b"}
    for places, why in (
        (reread["places"], "other than before: messages[0].content (system)"),
        ([], "no longer in the cache"),
    ):
        details = {"cached_tokens": 17, "reread": reread | {"places": places}}
        page.says(["one", usage(1300, 20, prompt_tokens_details=details)])
        page.send_and_wait("go")
        assert page.figures().startswith(
            f"17 of 1,300 prompt tokens from the cache · 1,249 read again ({why}) · 20 tokens"
        )
