"""The error metric e·M·eᵀ of stored vectors, and its block LDL factors, with which an encoder minimizes it in steps.

Letters: K KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from polarlm.engine.codecs import Rounding

_RIDGE = 0.05  # share of the mean diagonal that is added to the diagonal, since statistics are of only 512 tokens


@dataclass(frozen=True)
class Metric:
    """The cost of an error of each KV head, in the stored space (scaled and rotated). All arrays float32."""

    matrix: np.ndarray  # (K, D, D) M: an error e costs e·M·eᵀ. For tilted keys E[qᵀq], weighted by attention
    feedback: np.ndarray  # (K, D, D) F, strictly block-lower: row block j is F_j
    tilt_mean: np.ndarray | None  # (K, D) E[q], weighted likewise: norms are tilted; keys only


def key_metric(
    query_second: np.ndarray,
    query_mean: np.ndarray,
    scale: np.ndarray,
    rotation: np.ndarray | None,
    rounding: Rounding,
) -> Metric:
    """Return the metric of keys stored as (k / scale) @ rotation: the mean squared change of q·k.

    query_second (K, D, D), query_mean (K, D): E[qᵀq] and E[q], weighted by attention, before scale and rotation;
    scale (K, D); rotation (D, D) or None; rounding: the codec's.
    """
    orthogonal = np.eye(scale.shape[1]) if rotation is None else rotation.astype(np.float64)
    transform = scale[:, :, None] * orthogonal  # queries become q @ transform
    second = transform.swapaxes(1, 2) @ query_second.astype(np.float64) @ transform
    mean = (query_mean.astype(np.float64)[:, None] @ transform)[:, 0]
    return Metric(_float32(second), _block_ldl(_with_ridge(second), rounding.width), _float32(mean))


def value_metric(output_second: np.ndarray, rotation: np.ndarray | None, rounding: Rounding) -> Metric:
    """Return the metric of values stored as v @ rotation: the squared change of the layer's output.

    output_second (K, D, D): see `statistics.output_second`; rotation and rounding as in `key_metric`.
    """
    second = output_second.astype(np.float64)
    if rotation is not None:
        second = rotation.T.astype(np.float64) @ second @ rotation
    matrix = _with_ridge(second)
    return Metric(_float32(matrix), _block_ldl(matrix, rounding.width), None)


def split_layers(metric: Metric, layers: int) -> list[Metric]:
    """Return the metrics of several layers with as many heads each, from the metric of the heads of all layers."""

    def part(name: str, layer: int) -> Any:
        array = getattr(metric, name)
        return None if array is None else np.split(array, layers)[layer]

    return [Metric(*(part(field.name, layer) for field in fields(Metric))) for layer in range(layers)]


def join_layers(metrics: Sequence[Metric | None]) -> Metric | None:
    """Return the metrics of several layers as one, where K is the number of heads of all of them. Either all layers
    have a metric or none does. All have the same fields."""
    layers = [metric for metric in metrics if metric is not None]
    if len(layers) < 2:
        return metrics[0]

    def joined(name: str) -> Any:
        arrays = [getattr(metric, name) for metric in layers]
        if arrays[0] is None:
            return None
        return np.concatenate(arrays)

    return Metric(*(joined(field.name) for field in fields(Metric)))


def residue_costs(metric: Metric, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return F (K, D, D) float32, also where errors are not fed back, and what residues r_j = e_j + F_j·e_{<j} cost:
    M + ρ·I = (I + F)ᵀ · diag(D_j) · (I + F), so e·M·eᵀ = Σ_j r_j·D_j·r_jᵀ − ρ·e·eᵀ. M of a metric that is not tilted
    contains the ridge: ρ is 0. width: values per code.

    The costs are (K, D / 2, 4) float32, for two channels each: the first one's in D_j, that of both together, the
    second one's; the ridge ρ, negative (or −0) if errors are not fed back.
    """
    rest = metric.matrix.astype(np.float64)
    if metric.tilt_mean is not None:
        rest = _with_ridge(rest)
    ridge, is_fed_back = rest[:, 0, 0] - metric.matrix[:, 0, 0], metric.feedback.any()
    factor = metric.feedback if is_fed_back else _block_ldl(rest, width)
    lower = factor.astype(np.float64) + np.eye(factor.shape[1])
    costs, weighted = np.empty((len(lower), lower.shape[1] // 2, 4)), np.zeros_like(lower)
    for number in reversed(range(costs.shape[1])):
        pair, after = slice(2 * number, 2 * number + 2), slice(2 * number + 2, None)
        inside = np.linalg.inv(lower[:, pair, pair])
        block = rest[:, pair, pair] - lower[:, after, pair].swapaxes(1, 2) @ weighted[:, after, pair]
        block = inside.swapaxes(1, 2) @ block @ inside
        weighted[:, pair] = block @ lower[:, pair]
        costs[:, number] = np.stack([*block.reshape(-1, 4).T[[0, 1, 3]], ridge if is_fed_back else -ridge], axis=1)
    return factor, _float32(costs)


def remove_feedback(metric: Metric) -> Metric:
    """Return the metric without error feedback between pairs: each is rounded alone."""
    return replace(metric, feedback=np.zeros_like(metric.feedback))


def remove_tilt(metric: Metric) -> Metric:
    """Return the metric with norms that minimize the cost, whichever queries attend to a key."""
    if metric.tilt_mean is None:
        return metric
    return replace(metric, matrix=_float32(_with_ridge(metric.matrix.astype(np.float64))), tilt_mean=None)


def _with_ridge(second: np.ndarray) -> np.ndarray:
    """Return second (K, D, D) plus a multiple of I: `_RIDGE` of its mean diagonal."""
    size = second.shape[-1]
    return second + _RIDGE * second.trace(axis1=1, axis2=2)[:, None, None] / size * np.eye(size)


def _float32(x: np.ndarray) -> np.ndarray:
    """Return x as a C-contiguous float32 array, which BLAS takes without a copy."""
    return np.ascontiguousarray(x, np.float32)


def _block_ldl(matrix: np.ndarray, width: int) -> np.ndarray:
    """Block LDL of matrix (K, D, D) float64, positive definite, from the last block backward → F (K, D, D) float32."""
    rest, feedback = matrix.copy(), np.zeros_like(matrix)
    for start in range(matrix.shape[-1] - width, 0, -width):
        block = slice(start, start + width)
        feedback[:, block, :start] = np.linalg.solve(rest[:, block, block], rest[:, block, :start])
        rest[:, :start, :start] -= rest[:, :start, block] @ feedback[:, block, :start]
    return _float32(feedback)
