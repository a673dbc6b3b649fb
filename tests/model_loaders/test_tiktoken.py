"""Kimi's tiktoken.model: ids are tiktoken's, of the published expression, and control tokens have the names of
tokenizer_config.json."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import tiktoken
from hypothesis import example, given
from hypothesis import strategies as st

from polarlm.model_loaders import LoadError
from polarlm.model_loaders.tokenizers import Tokenizer, load_for_folder
from tests.model_loaders.vocabularies import RANKED

_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_FIRST, _REST = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
PUBLISHED = "|".join((
    *(r"[\p{Han}]+", rf"[^\r\n\p{{L}}\p{{N}}]?{_FIRST}*{_REST}+{_ENDING}"),
    *(rf"[^\r\n\p{{L}}\p{{N}}]?{_FIRST}+{_REST}*{_ENDING}", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*"),
    *(r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
))  # fmt: skip
WORDS = (*RANKED, "\u754c", "\u4e16\u754c", "'s")
WORDS += (
    "a\u4e16",
    "\u4e16a",
    "\u3042\u4e16",
    "aB",
    "/\n",
    "\n/",
    "//",
    "34",
    "23",
)  # which no cut allows, or not each
RANKS = {token: rank for rank, token in enumerate([bytes([i]) for i in range(256)] + [one.encode() for one in WORDS])}
FIRST = len(RANKS)
NAMES = {
    FIRST: ("[BOS]", True),
    FIRST + 1: ("[EOS]", True),
    FIRST + 2: ("<|im_end|>", True),
    FIRST + 7: ("<call>", False),
}
reference = tiktoken.Encoding("reference", pat_str=PUBLISHED, mergeable_ranks=RANKS, special_tokens={})


def write(folder: Path) -> Path:
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in RANKS.items())
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    added = {number: {"content": name, "special": special} for number, (name, special) in NAMES.items()}
    settings = {"added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_for_folder(write(tmp_path_factory.mktemp("kimi")), {"eos_token_id": FIRST + 2}, {})


@example(text=".\n/ //\n a世界 aB I'S 1234")
@given(
    text=st.text(st.sampled_from("helo wrdaB'sS \u4e16\u754c\u3042\u0301123/\n\r."), max_size=40) | st.text(max_size=20)
)
def test_ids_are_those_of_tiktoken(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.tokenize(text) == reference.encode(text)


def test_control_tokens_have_the_names_of_the_configuration(tokenizer: Tokenizer) -> None:
    control = tokenizer.control_tokens()
    assert len(control) == 258
    assert tokenizer.vocab_size == FIRST + 258
    assert {name: control[name] for name, _ in NAMES.values()} == {name: number for number, (name, _) in NAMES.items()}
    assert control[f"<|reserved_token_{FIRST + 3}|>"] == FIRST + 3
    assert tokenizer.tokenize("he<call>", control=True) == [RANKS[b"he"], FIRST + 7]
    assert tokenizer.bos_id is None
    assert {FIRST + 1, FIRST + 2} <= tokenizer.eos_ids


def test_a_damaged_file_is_a_sentence(tmp_path: Path) -> None:
    (write(tmp_path) / "tiktoken.model").write_bytes(b"aGU= 0\naGU= x\n")
    with pytest.raises(LoadError, match=r"tiktoken.model is a damaged tiktoken vocabulary .*download it again"):
        load_for_folder(tmp_path, {}, {})
