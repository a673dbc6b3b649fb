"""A mixture of experts: a router chooses gated networks for each token, whose results are added with weights."""

from __future__ import annotations

from dataclasses import dataclass

from polarlm.engine.backends.ops import Array, Ops, Routing
from polarlm.engine.model.layers import Eps, LayerInputs, adapted_linear, add_output, norm_of, slot
from polarlm.engine.weight_formats import ExpertLinear, Linear
from polarlm.model_loaders import config


@dataclass(frozen=True)
class ExpertsWeights:
    """Matrices are (out, in); None for what the family does not have."""

    norm: Array | None = slot("ffn_norm")  # (E,)
    router: Linear = slot("router", "linear")  # (count, E)
    choice_bias: Array | None = slot("choice_bias")  # (count,)
    gate_up: ExpertLinear = slot("experts_gate_up", "experts")  # (2F, E) of each expert, or (2F, latent)
    down: ExpertLinear = slot("experts_down", "experts")  # (E, F) of each expert, or (latent, F)
    latent_in: Linear | None = slot("latent_in", "linear")  # (latent, E)
    latent_out: Linear | None = slot("latent_out", "linear")  # (E, latent)
    shared_gate: Linear | None = slot("shared_gate", "linear")  # (1, E)
    shared_gate_up: Linear | None = slot("shared_gate_up", "linear")  # (2S, E), S: the shared network's size
    shared_down: Linear | None = slot("shared_down", "linear")  # (E, S)
    post_norm: Array | None = slot("ffn_post_norm")  # (E,): norms the result before it is added to the residual
    factors: Array | None = slot("expert_factors", default=None)  # (count,)
    # Norms (E,) of the inputs of router and experts, and of the results of experts and shared network before they are
    # added; without them, `norm` also serves the router and the experts.
    router_norm: Array | None = slot("router_norm", default=None)
    experts_norm: Array | None = slot("experts_norm", default=None)
    experts_post_norm: Array | None = slot("experts_post_norm", default=None)
    shared_post_norm: Array | None = slot("shared_post_norm", default=None)


class Experts:
    Weights = ExpertsWeights

    def __init__(self, ops: Ops, shape: config.Experts, eps: Eps, weights: ExpertsWeights):
        self._ops, self._shape, self._weights = ops, shape, weights
        self._norm, self._post_norm = norm_of(weights.norm, eps.before), norm_of(weights.post_norm, eps.after)
        self._router_norm = norm_of(weights.router_norm, eps.before) or self._norm
        self._experts_norm = norm_of(weights.experts_norm, eps.before) or self._norm
        self._experts_post_norm = norm_of(weights.experts_post_norm, eps.after)
        self._shared_post_norm = norm_of(weights.shared_post_norm, eps.after)

    def add(self, x: Array, inputs: LayerInputs) -> None:
        """Add the result to x (T, E), in place. Adapters change the shared network."""
        ops, w, shape = self._ops, self._weights, self._shape
        logits = ops.linear(x, w.router, norm=self._router_norm)
        routing = ops.route(logits, shape, w.choice_bias, w.factors)
        shared = self._shared(x, inputs.adapters)  # before x changes
        into = x if self._post_norm is None else None
        rows, norm, residual = x, self._experts_norm, into
        if w.latent_in is not None:
            rows, norm, residual = ops.linear(x, w.latent_in, norm=norm), None, None
        y = ops.experts(rows, routing, w.gate_up, w.down, shape.activation, norm=norm, residual=residual)
        if w.latent_out is not None:
            y = ops.linear(y, w.latent_out, residual=into)
        if self._experts_post_norm is not None:
            ops.rms_norm(y, self._experts_post_norm)
        if shared is not None:
            assert w.shared_down is not None
            add_output(ops, y, shared, w.shared_down, inputs.adapters, self._shared_post_norm)
        if self._post_norm is not None:
            ops.rms_norm(y, self._post_norm, residual=x)

    def _shared(self, x: Array, adapters: Routing | None) -> Array | None:
        """Return the input of the shared network's last projection, times its gate if it has one: (T, S), or None."""
        ops, w, shared = self._ops, self._weights, self._shape.shared
        if shared is None or w.shared_gate_up is None:
            return None
        y = adapted_linear(
            ops,
            x,
            w.shared_gate_up,
            adapters,
            norm=self._norm,
            activation=shared.activation,
            consumer=None if w.shared_gate is not None else w.shared_down,
        )
        if w.shared_gate is not None:
            ops.gate(y, adapted_linear(ops, x, w.shared_gate, adapters, norm=self._norm))
        return y
