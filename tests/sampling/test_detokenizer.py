"""Streamed text: whole characters only, and nothing from a stop string on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polarlm.engine.sampling.detokenizer import Detokenizer, StopFilter
from polarlm.model_loaders.tokenizers import load_for_gguf
from tests.model_loaders.vocabularies import CONTROL, tiny_spm


class Pieces:
    """A vocabulary whose ids are the places of its byte strings."""

    strips_leading_space = False

    def __init__(self, pieces: list[bytes]):
        self._pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]


@st.composite
def cut(draw, whole):
    """`whole` in pieces, empty ones among them."""
    edges = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    return [whole[a:b] for a, b in zip([0, *edges], [*edges, len(whole)], strict=True)]


def pushed(pieces: list[bytes]) -> tuple[list[str], str]:
    detokenizer = Detokenizer(Pieces(pieces), at_start=False)  # type: ignore[arg-type]
    return [detokenizer.push([i]) for i in range(len(pieces))], detokenizer.finish()


mixed = st.text(st.sampled_from("a é€😀\n\u0301"), max_size=20)


@given(mixed.flatmap(lambda text: st.tuples(st.just(text), cut(text.encode()))))
def test_chunks_have_whole_characters_however_they_are_cut_into_tokens(case) -> None:
    text, pieces = case
    chunks, rest = pushed(pieces)
    assert "".join(chunks) == text
    assert rest == ""
    complete = b""
    for piece, so_far in zip(pieces, range(1, len(chunks) + 1), strict=True):
        complete += piece
        assert "".join(chunks[:so_far]) == complete.decode(errors="ignore")  # nothing is held longer than it must be


@given(st.binary(max_size=20).flatmap(cut))
def test_invalid_bytes_give_the_same_text_however_they_are_cut(pieces) -> None:
    chunks, rest = pushed(pieces)
    assert "".join(chunks) + rest == b"".join(pieces).decode(errors="replace")


def test_the_space_that_sentencepiece_adds_is_stripped() -> None:
    tokenizer = load_for_gguf(tiny_spm(("▁he", 1), ("<|x|>", CONTROL)))
    ids = tokenizer.tokenize("he he")
    at_start, later = (Detokenizer(tokenizer, at_start=start) for start in (True, False))
    assert "".join(at_start.push([i]) for i in ids) == "he he"
    assert "".join(later.push([i]) for i in ids) == " he he"
    two = Detokenizer(tokenizer, at_start=True)
    assert two.push(tokenizer.tokenize("  he")) == "  he"


def test_control_tokens_have_no_text_and_do_not_end_the_start() -> None:
    tokenizer = load_for_gguf(tiny_spm(("▁he", 1), ("<|x|>", CONTROL)))
    x = tokenizer.control_tokens()["<|x|>"]
    detokenizer = Detokenizer(tokenizer, at_start=True)
    assert detokenizer.push([x]) == ""
    assert detokenizer.push(tokenizer.tokenize("he")) == "he"


def until_first_stop(text: str, stops: list[str], free: int) -> tuple[str, bool]:
    """The text before the stop string that is complete first after `free` characters, read one by one."""
    for end in range(free + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


letters = st.text("ab", max_size=16)


@given(letters.flatmap(cut), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.integers(0, 3))
def test_text_ends_where_the_first_stop_that_counts_begins_however_it_is_cut(pieces, stops, free) -> None:
    """It counts in the pieces after the first `free` ones, where it is complete."""
    stop, out = StopFilter(stops), ""
    expected, stopped = until_first_stop("".join(pieces), stops, len("".join(pieces[:free])))
    for number, piece in enumerate(pieces):
        out += stop.push(piece, counts=number >= free)
        assert expected.startswith(out)  # nothing that is part of a stop has leaked
        if stop.stopped_by is not None:
            break
    assert (stop.stopped_by is not None) == stopped
    assert out == expected[: len(expected) - stop.held]
