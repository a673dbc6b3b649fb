"""Mistral's tekken.json: ids are tiktoken's, behind the special ones; and damaged files."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from polarlm.model_loaders import LoadError
from polarlm.model_loaders.tokenizers import load_for_folder
from tests.model_loaders.vocabularies import RANKED

WORDS = (*RANKED, "\u00e9", "ing", "th", "the", " the")
TOKENS = [bytes([i]) for i in range(256)] + [word.encode() for word in WORDS]
PATTERN = r" ?[A-Za-z\u00e0-\u00ff]+|[0-9]{1,2}|[^A-Za-z0-9]"
SPECIAL = 30
RANKS = {token: rank for rank, token in enumerate(TOKENS)}
reference = tiktoken.Encoding("reference", pat_str=PATTERN, mergeable_ranks=RANKS, special_tokens={})
SIZES = {"default_vocab_size": SPECIAL + len(TOKENS), "default_num_special_tokens": SPECIAL}


def write(folder: Path, **changes: object) -> Path:
    """A file with more tokens than its size has."""
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate([*TOKENS, b"beyond", b"the size"])
    ]
    stored = {"config": {**SIZES, "pattern": PATTERN, "version": "v3"}, "vocab": entries, **changes}
    (folder / "tekken.json").write_text(json.dumps(stored))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    return load_for_folder(write(tmp_path_factory.mktemp("tekken")), {}, {})


@given(text=st.text(st.sampled_from("hello world the\u00e9\u4e16 123\n[]"), max_size=60) | st.text(max_size=20))
def test_ids_are_those_of_tiktoken(tokenizer, text: str) -> None:
    assert tokenizer.tokenize(text) == [SPECIAL + rank for rank in reference.encode(text)]


def test_special_tokens_are_numbered_first(tokenizer, tmp_path: Path) -> None:
    assert tokenizer.vocab_size == SPECIAL + len(TOKENS)
    control = tokenizer.control_tokens()
    assert (control["<s>"], control["</s>"], control["[INST]"], control["<SPECIAL_29>"]) == (1, 2, 3, 29)
    assert tokenizer.bos_id == 1
    assert 2 in tokenizer.eos_ids
    listed = [{"rank": 1, "token_str": "<s>"}, {"rank": 17, "token_str": "[THINK]"}, {"rank": 99, "token_str": "[NO]"}]
    control = load_for_folder(write(tmp_path, special_tokens=listed), {}, {}).control_tokens()
    assert (control["<s>"], control["[THINK]"], control["<SPECIAL_3>"]) == (1, 17, 3)
    assert "[NO]" not in control


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {}},
        {"vocab": []},
        {"vocab": [{"rank": 0, "token_bytes": "?"}]},
        {"config": {**SIZES, "pattern": "("}},
        {"special_tokens": [3]},
    ],
)
def test_a_damaged_file_is_a_sentence(changes: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"tekken.json is a damaged vocabulary .*download it again"):
        load_for_folder(write(tmp_path, **changes), {}, {})
