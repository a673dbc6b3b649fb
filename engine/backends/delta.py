"""The ops of layers whose state is not K/V, and the types of their arguments.

Letters: T rows, E hidden size, S slots, Q key heads, H value heads, A key dim, D value dim, C channels of q, k and v,
N tokens in a block. Mamba 2 calls these groups, heads, state size and head dim; its C, B and x are queries, keys and
values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from polarlm.engine.quantization.snapshot_codes import SnapshotCodes
from polarlm.model_loaders.config import Recurrent

Array = Any  # the backend's array type, float32

# Waits for states on the host, each (n, …): the fields of `SnapshotCodes`, and "inputs".
FetchStates = Callable[[], Mapping[str, np.ndarray]]


class DeltaWeights(NamedTuple):
    """The weights of a layer, float32, without its projections."""

    conv: Array  # (width, C): the oldest token's numbers first
    decay: Array  # (H,): negative
    dt_bias: Array  # (H,), or where channels decay by themselves (H·A,)
    norm: Array  # (D,): of each head's result
    eps: float  # epsilon of the norm
    tiled: bool  # see `model_loaders.config.GatedDelta`


class Mamba2Weights(NamedTuple):
    """The weights of a layer, float32, without its projections. I: H·D."""

    conv: Array  # (width, C): the oldest token's numbers first
    bias: Array | None  # (C,): of the convolution
    decay: Array  # (H,): negative
    dt_bias: Array  # (H,)
    skip: Array  # (H,): how much of its own x each head's result has
    norm: Array  # (I,): of the results, which are normalized in Q parts
    eps: float  # epsilon of the norm


class DeltaSlots(NamedTuple):
    """The states of sequences in one layer, float32. S slots have one each.

    The matrix of a head at the start of the current block is M. Of the block's tokens i = 0, 1, … a slot has keys k,
    updates u and the logarithm g of how much M has decayed. After token t, the head's matrix is

        exp(g_t) M + Σ_i exp(g_t − g_i) k_i u_iᵀ    of i ≤ t

    so that the state after any token of the block can be computed, and nothing has to be undone. Where channels decay
    by themselves, g is a vector (A,), and exp(g) multiplies rows of M and channels of k.
    """

    matrices: Array  # (S, H, A, D)
    keys: Array  # (S, Q, A, N)
    updates: Array  # (S, H, N, D)
    decays: Array  # (S, H, N), or (S, H, A, N)
    inputs: Array  # (S, width − 1 + N, C): of the convolution, from the width − 1 tokens before the block on


class DeltaSpan(NamedTuple):
    """Consecutive rows of one sequence."""

    slot: int
    first: int  # row
    rows: int
    place: int  # the first row's token in its block


class DeltaEnds(NamedTuple):
    """The states to keep of the ends of blocks that a prompt completes."""

    numbers: Sequence[int]  # n blocks, counted from the block of the first row
    matrices: Array  # (n, H, A, D): M after each block
    inputs: Array  # (n, width − 1, C): the convolution's inputs at the last tokens of each block


class SlotRows(NamedTuple):
    """Where an op adds its rows.

    slots: a layer's `DeltaSlots`; of `short_conv`, an array. spans: int32 (spans, 4), each a `DeltaSpan`; of a prompt
    on the host, of a step on the device; of `short_conv`, of each row. ends: given for prompts, whose slots advance to
    the next block at the end of each block. Without them a span has at most STEP_ROWS rows, all of one block.
    """

    slots: Any
    spans: Array
    ends: DeltaEnds | None = None


class RecurrentOps(Protocol):
    """The part of `Ops` for layers whose state is not K/V."""

    def check_recurrent(self, mixer: Recurrent, block_size: int) -> None:
        """Raises ValueError if there are no kernels for such layers."""

    def short_conv(self, inputs: Array, conv: Array, bias: Array | None, rows: SlotRows) -> Array:
        """C · (Σ_j conv[j] · u_j + bias) of each row (T, E), where u = B · x, and inputs (T, 3E) is [B | C | x].

        conv (width, E): the oldest token's numbers first. slots (S, width − 1 + N, E): the u of the tokens of blocks,
        after the u of the tokens before each block; this op writes the u of its rows. spans: int32 (T, 4): 1 + the slot
        of each row, 0 for none; its place in the block; 1 + the slot of the next block, in which the u of a block's
        last tokens are repeated, 0 for none; and how many of the rows before it are the tokens before it.
        """

    def gated_delta(self, projected: Array, w: DeltaWeights, rows: SlotRows) -> Array:
        """The results (T, H·D) of a gated delta rule for rows that are added to slots.

        projected (T, C + H·D + 2H) is [q | k | v | z | b | a]. q, k and v are convolved, and q and k get the length 1;
        with β = σ(b), a decay of g = w.decay · softplus(a + w.dt_bias) and the head's matrix S before the token,

            u = β (v − exp(g) Sᵀk),   S ← exp(g) S + k uᵀ,   y = A^-½ Sᵀq

        and the result is RMSNorm(y) · silu(z).
        CUDA: delta_step for a step; delta_blocks, delta_scan, delta_results and delta_inputs for a prompt.
        """

    def channel_delta(self, projected: Array, decays: Array, gates: Array, w: DeltaWeights, rows: SlotRows) -> Array:
        """As `gated_delta`, of which each channel of a head's keys decays by itself, and each head has its own key.

        projected (T, C + H + …) begins with [q | k | v | b]. The decay of a token is a vector (A,) of a head,
        g = w.decay · softplus(decays + w.dt_bias), decays (T, H·A), and

            u = β (v − (exp(g) ⊙ S)ᵀk),   S ← exp(g) ⊙ S + k uᵀ,   y = A^-½ Sᵀq

        where exp(g) multiplies rows. The result is RMSNorm(y) · σ(gates), gates (T, H·D).
        CUDA: channel_delta.
        """

    def mamba2(self, projected: Array, w: Mamba2Weights, rows: SlotRows) -> Array:
        """The results (T, H·D) of Mamba 2 for rows that are added to slots.

        projected (T, H·D + C + H) is [z | x | B | C | dt]. x, B and C are convolved; with Δ = softplus(dt + w.dt_bias)
        and the head's matrix S before the token,

            S ← exp(w.decay Δ) S + B (Δ x)ᵀ,   y = SᵀC + w.skip x

        and the result is RMSNorm(y · silu(z)), normalized in Q parts.
        CUDA: delta_step for a step; mamba2_blocks, delta_scan and delta_inputs for a prompt; mamba2_results for both.
        """

    def advance_delta(self, layers: Sequence[DeltaSlots], slots: Sequence[int], *, tiled: bool) -> None:
        """Let slots whose block is complete advance to the start of the next one, in place. tiled: see DeltaWeights."""

    def assign(self, target: Array, x: Any) -> None:
        """Copy x, an array of these ops or a number, to `target`, which may be strided."""

    def keep_states(self, ends: DeltaEnds, codes: SnapshotCodes) -> FetchStates:
        """Start to copy states to the host, as `codes` keeps them; `ends` may change afterwards."""

    def restore_states(self, snapshot: Mapping[str, np.ndarray], codes: SnapshotCodes) -> Array:
        """The matrices of a state that was kept, without its first axis."""
