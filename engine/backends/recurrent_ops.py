"""The ops of layers whose state is not K/V.

Letters: T rows, E hidden size, S slots, N tokens of a block; others as in `backends.delta`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from polarlm.engine.backends.delta import DeltaEnds, DeltaSlots, DeltaWeights, FetchStates, Mamba2Weights
from polarlm.engine.quantization.snapshot_codes import SnapshotCodes
from polarlm.model_loaders.config import Recurrent

Array = Any


class RecurrentOps(Protocol):
    """See `Ops`."""

    def check_recurrent(self, mixer: Recurrent, block_size: int) -> None:
        """Raises ValueError if there are no kernels for such layers."""

    def short_conv(self, inputs: Array, conv: Array, bias: Array | None, slots: Array, rows: Any) -> Array:
        """C · (Σ_j conv[j] · u_j + bias) of each row (T, E), where u = B · x, and inputs (T, 3E) is [B | C | x].

        conv (width, E): the oldest token's numbers first. slots (S, width − 1 + N, E): the u of the tokens of blocks,
        after those of the tokens before each block; this op writes those of its rows. rows: int32 (T, 4): 1 + the slot
        of each row, 0 for none; its place in the block; 1 + the slot of the next block, in which the u of a block's
        last tokens are repeated, 0 for none; and how many of the rows before it are the tokens before it.
        """

    def gated_delta(
        self, projected: Array, w: DeltaWeights, slots: DeltaSlots, spans: Any, ends: DeltaEnds | None = None
    ) -> Array:
        """The results (T, H·D) of a gated delta rule for rows that are added to slots; see `backends.delta`.

        projected (T, C + H·D + 2H) is [q | k | v | z | b | a]. q, k and v are convolved, and q and k get the length 1;
        with β = σ(b), a decay of g = w.decay · softplus(a + w.dt_bias) and the head's matrix S before the token,

            u = β (v − exp(g) Sᵀk),   S ← exp(g) S + k uᵀ,   y = A^-½ Sᵀq

        and the result is RMSNorm(y) · silu(z). spans: int32 (spans, 4), each a DeltaSpan; of a
        prompt on the host, of a step on the device. ends: given for prompts, whose slots advance to the next block at
        the end of each block. Without them a span has at most STEP_ROWS rows, all of one block.
        CUDA: gated_delta for a step; delta_blocks, delta_scan, delta_results and delta_inputs for a prompt.
        """

    def mamba2(
        self, projected: Array, w: Mamba2Weights, slots: DeltaSlots, spans: Any, ends: DeltaEnds | None = None
    ) -> Array:
        """The results (T, H·D) of Mamba 2 for rows that are added to slots; see `backends.delta`.

        projected (T, H·D + C + H) is [z | x | B | C | dt]. x, B and C are convolved; with Δ = softplus(dt + w.dt_bias)
        and the head's matrix S before the token,

            S ← exp(w.decay Δ) S + B (Δ x)ᵀ,   y = SᵀC + w.skip x

        and the result is RMSNorm(y · silu(z)), normalized in Q parts. spans, ends: as in `gated_delta`.
        CUDA: mamba2 for a step; mamba2_blocks, delta_scan and delta_inputs for a prompt; mamba2_results for both.
        """

    def advance_delta(self, layers: Sequence[DeltaSlots], slots: Sequence[int], *, tiled: bool) -> None:
        """Let slots whose block is complete advance to the start of the next one, in place. tiled: see DeltaWeights."""

    def assign(self, to: Array, x: Any) -> None:
        """Copy x, an array of these ops or a number, to `to`, which may be strided."""

    def keep_states(self, ends: DeltaEnds, codes: SnapshotCodes) -> FetchStates:
        """Start to copy states to the host, as `codes` keeps them; `ends` may change afterwards."""

    def restore_states(self, kept: Mapping[str, np.ndarray], codes: SnapshotCodes) -> Array:
        """The matrices of a state that was kept, without its first axis."""
