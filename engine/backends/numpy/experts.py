"""A mixture of experts in NumPy: the choice of experts, and their weighted results."""

from __future__ import annotations

import numpy as np

from polarlm.engine.backends.numpy.rows import apply_activation, quiet, rms_norm
from polarlm.engine.backends.ops import ExpertNetwork, Routing
from polarlm.engine.weight_formats import ExpertLinear
from polarlm.model_loaders.config import Experts


class ExpertOps:
    """The ops of a mixture of experts."""

    @quiet
    def route(
        self, logits: np.ndarray, rule: Experts, bias: np.ndarray | None = None, factors: np.ndarray | None = None
    ) -> Routing:
        if rule.scoring == "softmax":
            scores = np.exp(logits - logits.max(axis=1, keepdims=True))
            scores /= scores.sum(axis=1, keepdims=True)
        else:
            scores = 1 / (1 + np.exp(-logits))
        ranks = scores if bias is None else scores + bias
        if rule.groups > 1:
            ranks = _best_groups_only(ranks, rule)
        ids = np.argsort(-ranks, axis=1, kind="stable")[:, : rule.top_k].astype(np.int32)
        weights = np.take_along_axis(scores, ids, axis=1)
        if rule.renormalize:
            weights /= weights.sum(axis=1, keepdims=True)
        weights *= np.float32(rule.scale)
        if factors is not None:
            weights *= factors[ids]
        weights[~np.isfinite(logits).all(axis=1)] = np.nan
        return Routing(ids, weights)

    @quiet
    def experts(
        self,
        x: np.ndarray,
        routing: Routing,
        network: ExpertNetwork,
        residual: np.ndarray | None = None,
        adapters: Routing | None = None,
    ) -> np.ndarray:
        """The rows of an expert are multiplied together, so its weights are read once."""
        gate_up, down, (norm, activation, _) = network
        x = x if norm is None else rms_norm(x, *norm)
        y = np.zeros((len(x), down.shape[0]), np.float32)
        weights, top_k = routing.weights.ravel(), routing.ids.shape[1]
        order = np.argsort(routing.ids, axis=None, kind="stable")
        experts, first = np.unique(routing.ids.ravel()[order], return_index=True)
        for expert, pairs in zip(experts.tolist(), np.split(order, first)[1:], strict=True):
            pairs = pairs[weights[pairs] != 0]
            rows = pairs // top_k
            of_rows = None if adapters is None else adapters.part(rows)
            hidden = _product(x[rows], gate_up, expert, of_rows)
            hidden = hidden if activation is None else apply_activation(hidden, activation)
            # A row has an expert at most once.
            y[rows] += _product(hidden, down, expert, of_rows) * weights[pairs, None]
        if residual is None:
            return y
        residual += y
        return residual

    @quiet
    def gate(self, x: np.ndarray, logits: np.ndarray) -> None:
        x /= np.repeat(1 + np.exp(-logits), x.shape[1] // logits.shape[1], axis=1)


def _best_groups_only(ranks: np.ndarray, rule: Experts) -> np.ndarray:
    """ranks (T, count), −inf outside of each row's best groups."""
    by_group = ranks.reshape(len(ranks), rule.groups, -1)
    best = np.sort(by_group, axis=2)[:, :, -rule.best_of_group :].sum(axis=2)
    chosen = np.argsort(-best, axis=1, kind="stable")[:, : rule.top_groups, None]
    masked = np.full_like(by_group, -np.inf)
    np.put_along_axis(masked, chosen, np.take_along_axis(by_group, chosen, axis=1), axis=1)
    return masked.reshape(ranks.shape)


def _product(x: np.ndarray, w: ExpertLinear, expert: int, adapters: Routing | None = None) -> np.ndarray:
    """x (n, in) @ w (out, in)ᵀ of one expert + its bias, and what the rows' adapters add → (n, out)."""
    outputs = w.shape[0]
    (part,) = w.parts
    y: np.ndarray = x @ part.data[expert * outputs : (expert + 1) * outputs].T
    if w.bias is not None:
        y += w.bias[expert]
    if w.deltas is not None and adapters is not None:
        for number in np.unique(adapters.ids):
            at, pair = np.flatnonzero(adapters.ids == number), number * w.count + expert
            y[at] += adapters.weights[at] * _product(_product(x[at], w.deltas.a, pair), w.deltas.b, pair)
    return y
