"""Which vocabularies have tokens for filling in the middle of a text, and what such a prompt looks like."""

from __future__ import annotations

import pytest

from polarlm.server.reading.infill import infill_of
from tests.model_loaders.vocabularies import real


@pytest.mark.parametrize("name", ["qwen2.5-json"])
def test_vocabularies_with_the_tokens(name: str) -> None:
    tokenizer = real(name)
    infill = infill_of(tokenizer)
    names = [tokenizer.token_name(token) for token in (infill.prefix, infill.suffix, infill.middle)]
    assert names == ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    assert {tokenizer.token_name(token) for token in infill.ends} == {"<|repo_name|>", "<|file_sep|>", "<|fim_pad|>"}
    assert infill.prompt("a", "b") == [infill.prefix, "a", infill.suffix, "b", infill.middle]
    with_file = infill.prompt("a", "", "c", [("x.py", "y")])
    assert with_file[:4] == [infill.repository, "myproject\n", infill.file, "x.py\ny\n"]
    assert with_file[4:] == [infill.file, "filename\n", infill.prefix, "a", infill.suffix, infill.middle, "c"]


@pytest.mark.parametrize("name", ["llama3-json", "llama2-model", "stories15M-json"])
def test_vocabularies_without_them(name: str) -> None:
    assert infill_of(real(name)) is None
