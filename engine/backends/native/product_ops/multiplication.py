"""Products of rows with weights in tiles: with one matrix, or with the matrices of each row's experts.

Letters: T rows, P places of rows in panels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.native import tiles
from polarlm.engine.backends.native.kernels.linear.activations import (
    GROUP,
    Inputs,
    RowArguments,
    inputs_for,
    interleave_rows,
    panel_bytes,
    quantize_rows,
    write_matrices,
)
from polarlm.engine.backends.native.kernels.linear.matrix_sums import MOST_INPUTS, units_at_once
from polarlm.engine.backends.native.kernels.linear.product import (
    ExpertRows,
    ProductArguments,
    ProductSpec,
    product,
    units,
)
from polarlm.engine.backends.native.kernels.linear.tiling import SINGLE, Tiling, are_unsigned, tilings
from polarlm.engine.backends.native.launch import Launcher, LaunchSpec, PreparedLaunches
from polarlm.engine.backends.native.product_ops.loading import CachedTiles
from polarlm.engine.backends.ops import Fusion
from polarlm.engine.jit.lang import Kernel
from polarlm.engine.jit.lang.records import address
from polarlm.engine.weight_formats import ExpertLinear, Linear, Matrix
from polarlm.model_loaders.config import is_gated

_EXPERT, _ROWS = (ExpertRows._fields.index(name) for name in ("expert", "rows"))
_X, _OUT = (RowArguments._fields.index(name) for name in ("x", "out"))
_PANELS, _Y, _ROW_COUNT = (ProductArguments._fields.index(name) for name in ("x", "y", "rows"))


class RepeatableLaunch(NamedTuple):
    """Launches of a product, for a tiling. panels: the bytes of a panel, of each array of panels. uses: the launch, the
    field of its arguments, the number of the array among x, y and these, and the offset in it. by_row: launches with a
    unit for each row."""

    sizes: Tiling
    prepared: PreparedLaunches
    panels: list[int]
    uses: list[tuple[int, int, int, int]]
    by_row: list[int]


def inputs_of(launch: Launcher, w: Linear | ExpertLinear, rows: int) -> list[Inputs]:
    """How the product of `rows` rows with each part of the weights reads its inputs."""
    waits, bits = launch.in_graph or rows == 1, launch.input_bits
    if isinstance(w, Linear) and w.is_exact:
        bits = "16"
    # All rows of a prompt are multiplied in the same way, however it is cut.
    are_few = isinstance(w, ExpertLinear) if launch.in_graph and rows >= tiles.ROWS else waits
    return [
        inputs_for(part.format, part.shape[1], launch.level, waits=waits, bits=bits, are_few=are_few)
        for part in w.parts
    ]


def all_matrices(launch: Launcher, w: Linear | ExpertLinear, rows: int) -> bool:
    """Whether the product of `rows` rows with all parts of the weights reads panels of bfloat16."""
    return all(kind is Inputs.MATRICES for kind in inputs_of(launch, w, rows))


def bfloat_panels(launch: Launcher, rows: int, columns: int) -> np.ndarray:
    """Memory for panels of bfloat16: uint16 (rows, columns), in the panels' order. columns: a multiple of 32."""
    return launch.empty((-(-rows // tiles.ROWS) * tiles.ROWS, columns), np.uint16)[:rows]


class Multiplication:
    """The product of rows with one matrix, or of each row with its experts' matrices.

    inputs: how the product with each part of the weights reads its inputs. activation: the gated one that the product's
    kernel applies, if any. width: outputs of a row.
    """

    def __init__(
        self,
        launch: Launcher,
        w: Linear | ExpertLinear,
        rows: int,
        fusion: Fusion,
        *,
        adds: bool = False,
    ) -> None:
        """rows: how many there are. adds: the product is added to the result. The rest is as in `Ops.linear`."""
        self._launch, self._w, self._adds = launch, w, adds
        self._norm, activation, consumer = fusion
        self._is_stack = isinstance(w, ExpertLinear)
        self._count = w.count if isinstance(w, ExpertLinear) else 1
        self.inputs = inputs_of(launch, w, rows)
        self.shared = Inputs.shared(self.inputs)
        # One kernel multiplies by gate and up together if both halves of the outputs are whole tiles.
        has_halves = len(w.parts) == 1 and w.shape[0] % (2 * tiles.ROWS) == 0
        has_all = self.shared is not Inputs.MATRICES or w.shape[1] <= MOST_INPUTS
        is_fused = activation is not None and is_gated(activation) and has_halves and has_all
        self.activation = activation if is_fused else None
        self.width = w.shape[0] // (1 if self.activation is None else 2)
        are_matrices = consumer is not None and all_matrices(launch, consumer, rows) and self.width % GROUP == 0
        self.to_matrices = self.activation is not None and self.shared is Inputs.MATRICES and are_matrices
        self.repeatable: RepeatableLaunch | None = None  # once launched, if it can be repeated

    def repeat(self, repeatable: RepeatableLaunch, x: np.ndarray, y: np.ndarray) -> None:
        """As the first `launch`, with other rows: what is packed already takes no Python."""
        rows, (launches, commands) = len(x), (repeatable.prepared.launches, repeatable.prepared.commands)
        panels = [
            self._launch.empty((-(-rows // repeatable.sizes.rows), nbytes), np.uint8) for nbytes in repeatable.panels
        ]
        addresses = [address(array) for array in (x, y, *panels)]
        for number, place, array, offset in repeatable.uses:
            launches[number][1][place] = addresses[array] + offset
        assert commands is not None
        for number, (_, arguments, *_) in enumerate(launches):
            if number in repeatable.by_row:
                commands.units[number], commands.grains[number] = rows, self._launch.grain(rows)
            else:
                arguments[_ROW_COUNT] = rows
        self._launch.run(repeatable.prepared)
        self._launch.hold(x, y, *panels)

    def kernels(self, sizes: Tiling) -> list[Kernel]:
        kinds = [kind for kind in dict.fromkeys(self.inputs) if not self._are_panels(sizes, kind)]
        panels = [self._panel_kernel(sizes, kind) for kind in kinds]
        parts = zip(self._w.parts, self.inputs, strict=True)
        return [*panels, *(product(self._spec(part, sizes, kind)) for part, kind in parts)]

    def launch(
        self,
        x: np.ndarray,
        y: np.ndarray,
        sizes: Tiling,
        chosen: np.ndarray | None = None,
        sources: np.ndarray | None = None,
    ) -> None:
        """Write the products of x (T, in) to y (T or P, width), both float32; or uint16, if they are `bfloat_panels`.

        With experts: chosen (n, fields of `ExpertRows`), and sources (P,) int32, the row of x of each place.
        """
        first, launches, arrays = 0, list[LaunchSpec](), [x, y]
        uses, by_row = list[tuple[int, int, int, int]](), list[int]()
        place_of: dict[Inputs, int] = {}  # among arrays
        for part, kind in zip(self._w.parts, self.inputs, strict=True):
            if kind not in place_of:
                row_panels = self._panels(x, sizes, kind, sources, launches)
                place_of[kind] = 0 if row_panels is x else len(arrays)
                if row_panels is not x:
                    by_row.append(number := len(launches) - 1)
                    uses += [(number, _X, 0, 0), (number, _OUT, len(arrays), 0)]
                    arrays.append(row_panels)
            panels = arrays[place_of[kind]]
            spec, shape, data = self._spec(part, sizes, kind), (part.shape[0] // self._count, part.shape[1]), part.data
            bias, target = None if self._w.bias is None else self._w.bias[..., first:], y[:, first:]
            if isinstance(data, CachedTiles):
                assert chosen is not None
                self._launch.launch_all(launches)
                launches = []
                work = partial(self._multiply_cached, spec, shape, bias, data)
                self._launch.call(work, panels, target, chosen)
            else:
                uses += [(len(launches), _PANELS, place_of[kind], 0), (len(launches), _Y, 1, 4 * first)]
                launches.append(self._product(spec, shape, bias, data.memory, self._count, panels, target, chosen))
            first += shape[0]
        prepared = self._launch.launch_all(launches)
        if prepared is not None and chosen is None and len(x):
            self.repeatable = RepeatableLaunch(sizes, prepared, [array.shape[1] for array in arrays[2:]], uses, by_row)

    def _are_panels(self, sizes: Tiling, kind: Inputs) -> bool:
        """Whether rows whose values follow each other are panels as they are."""
        return kind is Inputs.FLOATS and self._norm is None and sizes.rows == 1 and not self._is_stack

    def _spec(self, part: Matrix, sizes: Tiling, kind: Inputs) -> ProductSpec:
        has_bias = self._w.bias is not None
        options = self._adds, has_bias, self.activation, self._is_stack
        return ProductSpec(part.format, sizes, *options, kind, self.to_matrices)

    def _panel_kernel(self, sizes: Tiling, kind: Inputs) -> Kernel[RowArguments]:
        is_normed = self._norm is not None
        if kind is Inputs.MATRICES:
            return write_matrices(is_normed, picks=self._is_stack)
        if kind is Inputs.FLOATS:
            return interleave_rows(is_normed, sizes.rows, picks=self._is_stack)
        is_unsigned = are_unsigned(sizes, self._launch.level, kind)
        return quantize_rows(is_normed, sizes.rows, inputs=kind, is_unsigned=is_unsigned, picks=self._is_stack)

    def _panels(
        self, x: np.ndarray, sizes: Tiling, kind: Inputs, sources: np.ndarray | None, launches: list[LaunchSpec]
    ) -> np.ndarray:
        """The rows of x, after their norm: (panels, bytes of a panel) uint8, which a launch writes, or x itself if that
        is the same: also panels of bfloat16, which have the type uint16."""
        if x.dtype == np.uint16:
            assert kind is Inputs.MATRICES
            assert self._norm is None
            return x
        columns, row_tile, rows = x.shape[1], sizes.rows, len(x) if sources is None else len(sources)
        if self._are_panels(sizes, kind) and x.flags.c_contiguous:
            return x
        nbytes = panel_bytes(columns, row_tile, self._launch.level, kind)
        out = self._launch.empty((-(-rows // row_tile), nbytes), np.uint8)
        weight, eps = self._norm or (None, 0.0)
        arguments = RowArguments(
            x=x, weight=weight, out=out, sources=sources, columns=columns, stride=x.strides[0], eps=eps
        )
        launches.append((self._panel_kernel(sizes, kind), rows, arguments, 0))
        return out

    def _product(
        self,
        spec: ProductSpec,
        shape: tuple[int, int],
        bias: np.ndarray | None,
        memory: np.ndarray,
        count: int,
        x: np.ndarray,
        y: np.ndarray,
        chosen: np.ndarray | None,
    ) -> LaunchSpec:
        """The launch for the products of panels x with a part of the weights. memory: `count` matrices (out, in) of
        this shape, in tiles one after another. bias (out,); with experts (count, out)."""
        (outputs, columns), half, matrix_tiles = shape, 1 if spec.activation is None else 2, len(memory) // count
        number = units(spec, matrix_tiles // half)
        arguments = ProductArguments(
            weights=memory,
            x=x,
            y=y,
            bias=bias,
            chosen=chosen,
            blocks=columns // spec.block_inputs,
            tile_bytes=memory.shape[1],
            x_stride=x.strides[0] * (tiles.ROWS if x.dtype == np.uint16 else 1),
            y_stride=y.strides[0] * (tiles.ROWS if y.dtype == np.uint16 else 1),
            rows=len(y),
            outputs=outputs // half,
            tiles=matrix_tiles // half,
            expert_bytes=matrix_tiles * memory.shape[1],
            bias_bytes=0 if bias is None else bias.strides[0],
        )
        if chosen is not None:
            return product(spec), len(chosen) * number, arguments, 0
        grain = units_at_once(number, self._launch.threads) if spec.inputs is Inputs.MATRICES else 0
        return product(spec), number, arguments, grain

    def _multiply_cached(
        self,
        spec: ProductSpec,
        shape: tuple[int, int],
        bias: np.ndarray | None,
        data: CachedTiles,
        x: np.ndarray,
        y: np.ndarray,
        chosen: np.ndarray,
    ) -> None:
        """Multiply by as many experts at a time as there are slots, and with slots in place of experts."""
        entries, experts = with_rows(chosen), [*dict.fromkeys(experts_of(chosen))]  # adapters may share one
        for batch in data.batches(experts):
            taken, slot_bias = [experts[index] for index in batch], None
            slots = dict(zip(taken, data.take(taken), strict=True))
            slot_entries = entries[np.isin(entries[:, _EXPERT], taken)]
            slot_entries[:, _EXPERT] = [slots[expert] for expert in slot_entries[:, _EXPERT].tolist()]
            if bias is not None:
                slot_bias = self._launch.empty((data.slots, bias.shape[1]))
                slot_bias[[*slots.values()]] = bias[taken]
            self._launch(*self._product(spec, shape, slot_bias, data.memory, data.slots, x, y, slot_entries))


def compiled_tiling(
    launch: Launcher, sizes: Tiling, rows: int, inputs: Inputs, kernels: Callable[[Tiling], list[Kernel]]
) -> Tiling:
    """The tiling to compute `rows` rows with: `sizes`, which kernels are specialized by. Until these are compiled, the
    best of those that are; if they cannot be compiled, that for one row. Results are equal."""
    if sizes != SINGLE and not launch.has_loaded(kernels(sizes)):
        others = [one for one in tilings(launch.level, inputs) if launch.has_loaded(kernels(one))]
        if others:
            launch.expect(kernels(sizes))
            return min(others, key=lambda one: -(-rows // one.rows) * (one.rows + 1))
    return sizes if sizes == SINGLE or launch.can_run(kernels(sizes)) else SINGLE


def with_rows(chosen: np.ndarray) -> np.ndarray:
    """The entries (n, fields of `ExpertRows`) of experts that have rows."""
    return chosen[chosen[:, _ROWS] > 0]


def experts_of(chosen: np.ndarray) -> list[int]:
    """The experts that have rows."""
    experts: list[int] = with_rows(chosen)[:, _EXPERT].tolist()
    return experts
