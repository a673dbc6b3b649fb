"""A mixture of experts: a router chooses gated networks for each token, whose results are added with weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

from polarlm.engine.backends.ops import Array, ExpertNetwork, Fusion, Ops, Routing
from polarlm.engine.model.layers import Eps, LayerInputs, OutputProjection, Projection, norm_of, slot
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
    post_norm_bias: Array | None = slot("ffn_post_norm_bias", default=None)  # (E,)
    sum_bias: Array | None = slot("sum_bias", default=None)  # (E,)
    factors: Array | None = slot("expert_factors", default=None)  # (count,)
    # Norms (E,) of the inputs of router and experts, and of the results of experts and shared network before they are
    # added; without them, `norm` also serves the router and the experts.
    router_norm: Array | None = slot("router_norm", default=None)
    experts_norm: Array | None = slot("experts_norm", default=None)
    experts_post_norm: Array | None = slot("experts_post_norm", default=None)
    shared_post_norm: Array | None = slot("shared_post_norm", default=None)


class SharedNetwork:
    """The network of all tokens: `project`, then `down`."""

    def __init__(self, ops: Ops, shape: config.GatedMLP, eps: Eps, weights: ExpertsWeights):
        assert weights.shared_gate_up is not None
        assert weights.shared_down is not None
        norm, gate = norm_of(weights.norm, eps.before), weights.shared_gate
        fusion = Fusion(norm, shape.activation, weights.shared_down if gate is None else None)
        self._ops = ops
        self._gate_up = Projection(ops, weights.shared_gate_up, fusion)
        self._gate = None if gate is None else Projection(ops, gate, Fusion(norm))
        self.down = OutputProjection(ops, weights.shared_down, norm_of(weights.shared_post_norm, eps.after))

    def project(self, x: Array, adapters: Routing | None) -> Array:
        """Return the input of the last projection, times the gate of a network that has one: (T, S)."""
        y = self._gate_up(x, adapters)
        if self._gate is not None:
            self._ops.gate(y, self._gate(x, adapters))
        return y


class Experts:
    Weights = ExpertsWeights

    def __init__(self, ops: Ops, shape: config.Experts, eps: Eps, weights: ExpertsWeights):
        self._ops, self._shape, self._weights = ops, shape, weights
        self._router = replace(weights.router, is_exact=True)
        norm, self._post_norm = norm_of(weights.norm, eps.before), norm_of(weights.post_norm, eps.after)
        experts_norm = norm_of(weights.experts_norm, eps.before) or norm
        self._router_fusion = Fusion(norm_of(weights.router_norm, eps.before) or norm)
        self._latent_fusion = Fusion(experts_norm)
        fusion = Fusion(experts_norm if weights.latent_in is None else None, shape.activation)
        self._network = ExpertNetwork(weights.gate_up, weights.down, fusion)
        self._shared = None if shape.shared is None else SharedNetwork(ops, shape.shared, eps, weights)
        self._experts_post_norm = norm_of(weights.experts_post_norm, eps.after)

    def add(self, x: Array, inputs: LayerInputs) -> None:
        """Add the result to x (T, E), in place."""
        ops, w, shape = self._ops, self._weights, self._shape
        routing = ops.route(ops.linear(x, self._router, self._router_fusion), shape, w.choice_bias, w.factors)
        shared = None if self._shared is None else self._shared.project(x, inputs.adapters)  # before x changes
        into = x if self._post_norm is None else None
        rows, residual = x, into
        if w.latent_in is not None:
            rows, residual = ops.linear(x, w.latent_in, self._latent_fusion), None
        y = ops.experts(rows, routing, self._network, residual, inputs.adapters)
        if w.latent_out is not None:
            y = ops.linear(y, w.latent_out, residual=into)
        if self._experts_post_norm is not None:
            ops.rms_norm(y, self._experts_post_norm)
        if self._shared is not None:
            self._shared.down.add(y, shared, inputs.adapters)
        if self._post_norm is not None:
            ops.rms_norm(y, self._post_norm, residual=x)
