"""Lines of a streamed text break between words."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit.utils import get_cwidth

from polarlm.engine.chat.wrapping import Wrapping

WIDTH = 20
CASES = (
    ("The quick brown fox jumps over", "The quick brown fox\njumps over"),
    ("- one two three four five", "- one two three four\nfive"),
    ("ends with\na line\n\nand more", "ends with\na line\n\nand more"),
    ("```py\nprint('a long line of code')\n```\nand text that is wrapped", None),
    ("an-unbroken-word-of-more-than-twenty end", "an-unbroken-word-of-more-than-twenty end"),
    ("日本語のテキストは空白がありませんから途中で", "日本語のテキストは空白がありませんから途中で"),
)


def wrapped(text: str, step: int) -> str:
    wrapping = Wrapping(lambda: WIDTH)
    parts = [wrapping.feed(text[at : at + step]) for at in range(0, len(text), step)]
    return "".join([*parts, wrapping.feed("\n")]).removesuffix("\n")


def test_lines_break_in_front_of_a_word_however_the_text_comes() -> None:
    for text, lines in CASES:
        for step in (1, 3, len(text)):
            if lines is None:
                lines = "```py\nprint('a long line of code')\n```\nand text that is\nwrapped"
            assert wrapped(text, step) == lines, (text, step)


@given(st.text(st.sampled_from("ab \n`é語"), max_size=80), st.integers(1, 9))
def test_only_spaces_change_and_no_word_that_fits_is_broken(text: str, step: int) -> None:
    result = wrapped(text, step)
    assert result.split() == text.split()
    if "`" not in text and "語" not in text:
        assert all(
            get_cwidth(line.rstrip()) <= WIDTH or max(map(len, line.split())) > WIDTH for line in result.split("\n")
        )
