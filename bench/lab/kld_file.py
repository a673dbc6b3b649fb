"""Files of log-probabilities in full precision, in the format of llama.cpp's `llama-perplexity --kl-divergence-base`.

A file has the tokens of a text in windows of the same length, and for the second half of each window the distribution
of the token after it:

| bytes | what |
|---|---|
| 8 | `_logits_` |
| 4 × 3 | tokens of a window n, vocabulary V, number of windows, as int32 |
| 4·n·windows | the tokens of the text, as int32 |
| 2·(V + 4) for each row, V rounded up to even | scale and least log-probability as float32, V codes as uint16 |

A window has n − 1 − ⌊n/2⌋ rows, a row for each token from ⌊n/2⌋ on but the last; the log-probability of a token is
least + scale · code. Log-probabilities more than 16 below the largest are stored as if they were 16 below. All numbers
are little-endian. Where a model begins texts with BOS, the first token of a window is read as BOS, whatever it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from polarlm.engine import EngineError

_MAGIC = b"_logits_"
_HEAD = len(_MAGIC) + 12
_LEAST_WINDOW = 4  # tokens: a window of three has no rows


@dataclass(frozen=True)
class KldFile:
    """An open file. Rows are mapped, not read."""

    path: Path
    vocabulary: int
    ids: np.ndarray  # (windows, tokens) int32, the text's
    codes: np.ndarray  # (windows, rows, 4 + V or one more) uint16, the first four two float32

    @property
    def first(self) -> int:
        """The position in a window whose row is the first."""
        return self.ids.shape[1] // 2

    def logprobs(self, window: int, first: int, last: int) -> np.ndarray:
        """Log-probabilities (last − first, V) float32 of rows of a window."""
        return decode(self.codes[window, first:last], self.vocabulary)


def read(path: str | Path) -> KldFile:
    """Open a file. Raises EngineError with a sentence for one that cannot be read, or is not a whole file."""
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(_HEAD)
            if len(head) < _HEAD or not head.startswith(_MAGIC):
                raise EngineError(
                    f"{path} is no file of log-probabilities: llama-perplexity --kl-divergence-base writes them"
                )
            tokens, vocabulary, windows = (int(number) for number in np.frombuffer(head, "<i4", 3, len(_MAGIC)))
            if tokens < _LEAST_WINDOW or vocabulary < 1 or windows < 1:
                raise EngineError(
                    f"{path} is damaged: it names {windows} windows of {tokens} tokens, and a vocabulary of "
                    f"{vocabulary}"
                )
            rows, words = _rows(tokens), _words(vocabulary)
            if size != (expected := nbytes(windows, tokens, vocabulary)):
                raise EngineError(
                    f"{path} is damaged: it has {size:,} bytes, and {windows} windows of {tokens} tokens take "
                    f"{expected:,}; let llama-perplexity write it to its end"
                )
            ids = np.frombuffer(file.read(4 * windows * tokens), "<i4").reshape(windows, tokens)
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror}") from None
    if not 0 <= ids.min() <= ids.max() < vocabulary:
        raise EngineError(f"{path} is damaged: it has token ids outside of its vocabulary of {vocabulary}")
    codes = np.memmap(path, "<u2", "r", _HEAD + ids.nbytes, (windows, rows, words))
    return KldFile(path, vocabulary, ids, codes)


def nbytes(windows: int, tokens: int, vocabulary: int) -> int:
    """The bytes of a file."""
    return _HEAD + windows * (4 * tokens + 2 * _rows(tokens) * _words(vocabulary))


def decode(rows: np.ndarray, vocabulary: int) -> np.ndarray:
    """Log-probabilities (T, V) float32 of rows of a file."""
    heads = np.ascontiguousarray(rows[:, :4]).view("<f4")
    return heads[:, :1] * rows[:, 4 : 4 + vocabulary].astype(np.float32) + heads[:, 1:]


def _rows(tokens: int) -> int:
    return tokens - 1 - tokens // 2


def _words(vocabulary: int) -> int:
    return 4 + vocabulary + vocabulary % 2
