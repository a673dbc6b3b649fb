"""GPTQ and AWQ: 4 or 8 bits, a scale and a zero point for each group of inputs: w = scale * (q - zero).

GPTQ packs codes along the inputs and zero points along the outputs; with `desc_act`, `g_idx` says to which group an
input belongs. AWQ packs both along the outputs, in an order of its own.
"""

from __future__ import annotations

from math import prod

import numpy as np

from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensors import PLAIN, StoredTensor
from polarlm.model_loaders.weight_quantization import matrix
from polarlm.model_loaders.weight_quantization.matrix import Codes, Parts, numbers, part, unpack

_AWQ_ORDER = 0, 2, 4, 6, 1, 3, 5, 7  # the outputs of a word, from its lowest bits


def _format(settings: Fields) -> str:
    return settings.text("checkpoint_format", settings.text("format", "gptq"))


def read(parts: Parts, settings: Fields) -> StoredTensor | None:
    if "qweight" not in parts:
        return None
    is_awq, bits = settings.text("quant_method") == "awq", settings.integer("bits")
    packed, count, top = part(parts, "qweight", None, ("I32",)), 32 // bits, (1 << bits) - 1
    columns, rows = packed.shape[0] * (1 if is_awq else count), packed.shape[1] * (count if is_awq else 1)
    group = matrix.group_size(settings, columns)
    scales = part(parts, "scales", (columns // group, rows), PLAIN)
    zeros = part(parts, "qzeros", (columns // group, rows // count), ("I32",))
    order = matrix.group_order(parts, "g_idx", columns, columns // group)
    added = np.uint8(not is_awq and _format(settings) == "gptq")  # it stores them minus 1

    def outputs(words: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Of words that are packed along the outputs, (n, words), the codes of some: uint8 (stop - start, n)."""
        first = start // count
        of_outputs = np.ascontiguousarray(words[:, first : -(-stop // count)].T)
        codes = np.empty((len(of_outputs), count, len(words)), np.uint8)
        for place, output in enumerate(_AWQ_ORDER if is_awq else range(count)):
            codes[:, output] = of_outputs >> np.uint32(bits * place) & np.uint32(top)
        return codes.reshape(-1, len(words))[start - first * count :][: stop - start]

    def decode(start: int, stop: int) -> Codes:
        words = packed.source.whole(packed.offset, 4 * prod(packed.shape)).view("<u4").reshape(packed.shape)
        if stop == rows:
            packed.source.forget()
        codes = outputs(words, start, stop) if is_awq else unpack(words[:, start:stop].T, bits)
        zeros_here = outputs(numbers(zeros), start, stop) + added & np.uint8(top)
        scales_here = numbers(scales)[:, start:stop].T
        if order is not None:
            zeros_here, scales_here = zeros_here[:, order], scales_here[:, order]
        return Codes(matrix.minus_zeros(codes, zeros_here, bits), scales_here)

    type = matrix.integer_type(bits, group if order is None else 0, not is_awq and settings.flag("sym", False))
    return matrix.quantized_matrix(packed, (rows, columns), type, decode)
