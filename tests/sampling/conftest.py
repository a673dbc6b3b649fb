"""What compiles constraints for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from polarlm.engine.sampling.grammars import Grammars
from polarlm.model_loaders.tokenizers import load_for_gguf
from tests.model_loaders import vocabularies as vocab


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    tokenizer = load_for_gguf(vocab.tiny_bpe())
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    yield grammars
    grammars.close()
