"""Answers of messages in channels, split into texts: the same ones however the text comes."""

from __future__ import annotations

from polarlm.engine.sampling.channel_reader import ChannelReader, Inline
from polarlm.model_loaders.chat.channels import Channels

CHANNELS = Channels("<|start|>", "assistant", "<|channel|>", "<|message|>", "<|end|>", "analysis", "final")
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
TEXT = "<|channel|>final<|message|>a < b"
BEFORE = ' to=functions.time<|channel|>commentary json<|message|>{"a":1}'
AFTER = '<|channel|>commentary to=functions.time <|constrain|>json<|message|>{"a":1}'
CALL = [("call", "time"), ("arguments", '{"a":1}')]


def split(*texts: str, begun: bool = False) -> list[tuple[str, str]]:
    """(kind, text) of each text, neighbours of one kind in one."""
    reader = ChannelReader(CHANNELS, to=" to=functions.", names=("time",), is_begun=begun)
    found: list[tuple[str, str]] = []
    for one in [one for text in texts for one in reader.push(text)] + reader.finish():
        if found and found[-1][0] == one.kind:
            found[-1] = one.kind, found[-1][1] + one.text
        else:
            found.append((one.kind, one.text))
    return found


IS_SPLIT_CASES = [
    (TEXT, [("text", "a < b")]),
    (THOUGHT + TEXT, [("reasoning", "hm"), ("text", "a < b")]),
    (THOUGHT + THOUGHT + TEXT, [("reasoning", "hm\n\nhm"), ("text", "a < b")]),
    (THOUGHT + BEFORE, [("reasoning", "hm"), *CALL]),
    (AFTER, CALL),
    (f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{AFTER}", [("text", "I look."), *CALL]),
    (f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{TEXT}", [("text", "I look.\n\na < b")]),
    (f"<|channel|>analysis<|message|>hm<|start|>assistant{TEXT}", [("reasoning", "hm"), ("text", "a < b")]),
    ("<|channel|>analysis to=python code<|message|>1+1", [("reasoning", "1+1")]),
    ("<|channel|>commentary to=functions.other json<|message|>{}", [("text", "{}")]),
    ("no header, " + "much text" * 99, [("text", "no header, " + "much text" * 99)]),
    (THOUGHT + "<|channel|>fin", [("reasoning", "hm")]),
    ("<|channel|>" + "x" * 600, [("text", "<|channel|>" + "x" * 600)]),
]


def test_an_answer_is_split() -> None:
    for answer, expected in IS_SPLIT_CASES:
        assert split(answer) == expected
        assert split(*answer) == expected


def test_an_answer_may_begin_after_its_header() -> None:
    assert split("a < b", begun=True) == [("text", "a < b")]


def test_reasoning_may_be_part_of_the_text() -> None:
    reader, inline = ChannelReader(CHANNELS), Inline(CHANNELS)
    text = "".join(inline.text(one) for one in reader.push(THOUGHT + TEXT) + reader.finish())
    assert text == "<|channel|>analysis<|message|>hm<|end|>\n\na < b"
