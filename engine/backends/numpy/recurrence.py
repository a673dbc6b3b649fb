"""What gated delta rules and Mamba 2 share in NumPy: convolutions, decays, and the keys of heads."""

from __future__ import annotations

import numpy as np


def convolve(new: np.ndarray, conv: np.ndarray, bias: np.ndarray | None, inputs: np.ndarray, place: int) -> np.ndarray:
    """silu of the convolution of rows (count, C), which are added to a slot's `inputs`."""
    count, width = len(new), len(conv)
    inputs[place + width - 1 : place + width - 1 + count] = new
    sums = sum(weight * inputs[place + back : place + back + count] for back, weight in enumerate(conv))
    return silu(np.asarray(sums if bias is None else sums + bias))


def add_decays(decays: np.ndarray, new: np.ndarray, place: int) -> np.ndarray:
    """Append the logarithms (H, count) of the decays of rows to a slot's (H, N), and return their part of it."""
    before = decays[:, place - 1 : place] if place else np.zeros((len(decays), 1), np.float32)
    new_decays = decays[:, place : place + new.shape[1]]
    new_decays[...] = before + np.cumsum(new, axis=1)
    return new_decays


def decays_between(decays: np.ndarray, place: int, count: int) -> np.ndarray:
    """How much of the update of each token is left at each of the rows, (H, count, place + count); 0 of later ones."""
    new_decays, end = decays[:, place : place + count], place + count
    sees = np.tri(count, end, place, dtype=bool)
    return np.exp(np.where(sees, new_decays[..., None] - decays[:, None, :end], -np.inf))


def keys_of_heads(key_heads: int, heads: int, *, tiled: bool) -> np.ndarray:
    """The key head of each value head, (H,)."""
    return np.arange(heads) % key_heads if tiled else np.arange(heads) // (heads // key_heads)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(np.float32(0), x)
