"""The picture of the cache: blocks in full precision, coded and shared, which move with the answer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.server.page.browser import Browser
from tests.server.page.visitor import choose, done, says, send, send_and_wait, stats
from tests.server.process import SMALL_BLOCKS, Process
from tests.tiny import PLAIN, load_tiny


def blocks(page: Browser, tokens: int, cached: int, length: int, window: int | None = None) -> dict[str, Any]:
    return page.run(
        "return blocksOf(arguments[0], arguments[1], {block_size: arguments[2], window: arguments[3]})",
        tokens,
        cached,
        length,
        window,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "cached", "full", "coded", "shared"),
    [
        (0, 0, 0, 0, 0),
        (1, 0, 1, 0, 0),
        (64, 0, 1, 0, 0),
        (65, 64, 2, 0, 1),
        (128, 0, 1, 1, 0),
        (700, 460, 2, 9, 7),
        (700, 700, 2, 9, 10),
    ],
)
def test_blocks_are_counted_from_tokens(
    page: Browser, tokens: int, cached: int, full: int, coded: int, shared: int
) -> None:
    found = blocks(page, tokens, cached, 64)
    assert (found["full"], found["coded"], found["shared"]) == (full, coded, shared)
    assert found["all"] == full + coded == -(-tokens // 64)


def test_behind_a_window_are_the_blocks_that_can_be_seen(page: Browser) -> None:
    found = blocks(page, 700, 0, 64, 128)
    assert (found["first"], found["full"], found["coded"]) == (8, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9, 16, 17, 24, 50])
def test_the_engine_holds_as_many_bytes_as_these_blocks_take(page: Browser, tiny_path: Path, tokens: int) -> None:
    with load_tiny(tiny_path, **PLAIN) as engine:
        shape = engine.cache_shape
    found = blocks(page, tokens, 0, shape.block_size)
    layers = range(len(shape.layers))
    taken = found["coded"] * shape.quantized_bytes(layers) + found["full"] * shape.full_bytes(layers)
    assert taken == shape.sequence_bytes(tokens)


def test_the_picture_is_said_in_words(page: Browser) -> None:
    words = "return blocksInWords(blocksOf(...arguments, {block_size: 64, window: null}), 3.94)"
    assert page.run(words, 700, 460) == (
        "11 blocks of 64 tokens: 2 in full precision, 9 coded (3.9 bits), 7 shared with an earlier prompt"
    )
    assert page.run(words, 0, 0) == "No block of 64 tokens yet"
    assert page.run(words, 10, 0) == "1 block of 64 tokens: 1 in full precision"


@pytest.mark.slow
def test_it_moves_with_the_answer_and_is_what_the_engine_tells(visit: Any, tiny_path: Path, tmp_path: Path) -> None:
    prelude = SMALL_BLOCKS.format(kept=4)
    with Process(tiny_path, tmp_path, troubled=True, prelude=prelude) as server:
        page = visit(server)
        page.until(lambda: "bits/value" in page.text("#bits"))
        assert stats(server, 0)["block_size"] == 8
        choose(page, temperature=0, max_tokens=60)
        page.run(
            """
            const words = document.getElementById("blocks-say");
            window.seen = [];
            new MutationObserver(() => window.seen.push(words.textContent)).observe(words, {childList: true});
            """
        )
        send(page, "the rain")
        page.until(lambda: page.text(".answer") and done(page))
        assert len(set(page.run("return window.seen"))) > 3
        total = page.run("return used.tokens")
        expected = blocks(page, total, 0, 8)
        assert page.text("#blocks-say").startswith(f"{expected['all']} blocks of 8 tokens: {expected['full']} in full")
        assert "shared" not in page.text("#blocks-say")
        page.click("#new")
        send_and_wait(page, "the rain")
        found = re.search(r"(\d+) shared", page.text("#blocks-say"))
        cached = page.run("return rows.at(-1).message.usage.cached")
        assert int(found[1]) == cached // 8 > 1
        name = page.run("return document.getElementById('blocks').getAttribute('aria-labelledby')")
        assert name == "blocks-say"


@pytest.mark.slow
def test_every_block_has_a_cell_up_to_a_long_context(page: Browser) -> None:
    script = """
        const [tokens, context] = arguments, length = 64;
        drawn = "";
        drawBlocks(blocksOf(tokens, tokens / 2, {block_size: length, window: null}), {bits_per_value: 4, context});
        const cells = (path) => path.getAttribute("d").split("M").length - 1;
        const counted = [...document.querySelectorAll("#blocks path")].map(cells);
        const [, , width, height] = document.getElementById("blocks").getAttribute("viewBox").split(" ").map(Number);
        return [counted, height / width];
    """
    for tokens, cells in ((1000, 16), (8000, 125), (131072, 2048)):
        counted, ratio = page.run(script, tokens, 131072)
        free, own, shared, filled_own, filled_shared = counted
        assert own + shared == filled_own + filled_shared == cells
        assert shared == int(tokens / 2) // 64
        assert free < 2 * 264 / 5
        assert ratio < 1.1
    counted, _ = page.run(script, 1 << 20, 1 << 20)  # a cell stands for several blocks
    assert 2000 < counted[1] + counted[2] <= 2640


@pytest.mark.slow
def test_colours_can_be_told_apart_by_those_who_see_two_of_them_alike(page: Browser) -> None:
    """The two hues keep a distance for each kind of colour blindness, and kinds of blocks differ in shape as well."""
    # By Viénot, Brettel and Mollon (1999) for red and green, in linear RGB.
    script = (
        "return ['--own', '--shared', '--paper'].map((name) => getComputedStyle(document.body).getPropertyValue(name))"
    )
    colours = [[int(text.strip()[start : start + 2], 16) / 255 for start in (1, 3, 5)] for text in page.run(script)]
    linear = [[part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in c] for c in colours]

    def protan(colour: list[float]) -> tuple[float, float]:
        red, green, blue = colour
        return 0.1121 * red + 0.8853 * green, blue

    def deutan(colour: list[float]) -> tuple[float, float]:
        red, green, blue = colour
        return 0.2928 * red + 0.7072 * green, blue

    def apart(a: tuple[float, float], b: tuple[float, float]) -> float:
        return max(abs(x - y) for x, y in zip(a, b, strict=True))

    for sight in (protan, deutan):
        own, shared, paper = map(sight, linear)
        assert apart(own, shared) > 0.1
        assert min(apart(own, paper), apart(shared, paper)) > 0.3


@pytest.mark.slow
def test_what_is_shared_is_seen_while_the_prompt_is_computed(page: Browser) -> None:
    progress = {"total": 640, "cache": 320, "processed": 384, "time_ms": 5}
    says(page, [{"event": {"choices": [], "prompt_progress": progress}}, {"wait": 60000}])
    send(page, "go")
    page.until(lambda: "shared" in page.text("#blocks-say"))
    assert page.text("#blocks-say") == (
        "6 blocks of 64 tokens: 1 in full precision, 5 coded (4.8 bits), 5 shared with an earlier prompt"
    )
    assert page.text("#progress") == "384 of 640 tokens"


@pytest.mark.slow
def test_the_real_server_tells_how_far_the_prompt_is(page: Browser) -> None:
    page.run(
        """
        const real = progressed;
        window.told = [];
        progressed = (progress) => { window.told.push(progress); return real(progress); };
        """
    )
    choose(page, temperature=0, max_tokens=3)
    send_and_wait(page, "the rain and then on")
    told = page.run("return told")
    assert told
    assert told[-1]["processed"] == told[-1]["total"] == page.run("return rows.at(-1).message.usage.prompt")


@pytest.mark.slow
def test_a_server_that_hides_what_is_cached_shows_no_block_as_shared(page: Browser) -> None:
    counts = {"prompt_tokens": 300, "completion_tokens": 20, "total_tokens": 320, "prompt_tokens_details": None}
    says(page, ["one", {"event": {"choices": [], "usage": counts}}])
    send_and_wait(page, "go")
    assert page.text("#blocks-say") == "5 blocks of 64 tokens: 1 in full precision, 4 coded (4.8 bits)"
