"""What the ops of gated delta rules and of Mamba 2 take.

Letters: Q key heads, H value heads, A key dim, D value dim, C channels of q, k and v, N tokens in a block. Mamba 2
calls these groups, heads, state size and head dim; its C, B and x are queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = Any  # the backend's own, float32

# Waits for states on the host, each (n, …): the fields of `SnapshotCodes`, and "inputs".
FetchStates = Callable[[], Mapping[str, np.ndarray]]


class DeltaWeights(NamedTuple):
    """The weights of a layer, float32, without its projections."""

    conv: Array  # (width, C): the oldest token's numbers first
    decay: Array  # (H,): negative
    dt_bias: Array  # (H,)
    norm: Array  # (D,): of each head's result
    eps: float  # of `norm`
    tiled: bool  # see `model_loaders.config.GatedDelta`


class Mamba2Weights(NamedTuple):
    """The weights of a layer, float32, without its projections. I: H·D."""

    conv: Array  # (width, C): the oldest token's numbers first
    bias: Array | None  # (C,): of the convolution
    decay: Array  # (H,): negative
    dt_bias: Array  # (H,)
    skip: Array  # (H,): how much of its own x each head's result has
    norm: Array  # (I,): of the results, which are normalized in Q parts
    eps: float  # of `norm`


class DeltaSlots(NamedTuple):
    """The states of sequences in one layer, float32. S slots have one each.

    The matrix of a head at the start of the current block is M. Of the block's tokens i = 0, 1, … a slot has keys k,
    updates u and the logarithm g of how much M has decayed. After token t, the head's matrix is

        exp(g_t) M + Σ_i exp(g_t − g_i) k_i u_iᵀ    of i ≤ t

    so that the state after any token of the block can be computed, and nothing has to be undone.
    """

    matrices: Array  # (S, H, A, D)
    keys: Array  # (S, Q, A, N)
    updates: Array  # (S, H, N, D)
    decays: Array  # (S, H, N)
    inputs: Array  # (S, width − 1 + N, C): of the convolution, those of the tokens before the block first


class DeltaSpan(NamedTuple):
    """Consecutive rows of one sequence."""

    slot: int
    first: int  # row
    rows: int
    place: int  # of the first row's token in its block


class DeltaEnds(NamedTuple):
    """The states to keep of the ends of blocks that a prompt completes."""

    numbers: Sequence[int]  # of n blocks, counted from the block of the first row
    matrices: Array  # (n, H, A, D): M after each
    inputs: Array  # (n, width − 1, C): of the convolution, those of the last tokens of each
