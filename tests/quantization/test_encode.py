"""Encoding with a metric: block LDL factors, error feedback, and norms."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.engine import codecs
from polarlm.engine.quantization import encode
from polarlm.engine.quantization.encode import encode_with_metric
from polarlm.engine.quantization.metric import (
    Metric,
    key_metric,
    remove_feedback,
    remove_tilt,
    residue_costs,
    split_layers,
    value_metric,
)
from polarlm.engine.quantization.statistics import output_second
from tests.codecs.data import gaussian
from tests.pairs import in_turn

EPS = float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Table:
    """The simplest codec with a table: a brute-force search, codes and norms unpacked. It is its own rounding."""

    points: np.ndarray  # (C, width) float32
    name: str = "table"

    @property
    def rounding(self):
        return self

    @property
    def width(self):
        return self.points.shape[1]

    def nearest(self, x):
        codes = np.square(x[:, None] - self.points).sum(-1).argmin(1).astype(np.uint16)
        return codes, self.points[codes]

    def assemble(self, codes, norms):
        return {"codes": codes, "norms": norms}

    def encode(self, x):
        norms = np.sqrt(np.square(x).mean(-1))
        codes, _ = self.nearest((x / np.where(norms, norms, 1)[..., None]).reshape(-1, self.width))
        return self.assemble(codes.reshape(*x.shape[:-1], -1), norms)

    def decode(self, codes):
        points = self.points[codes["codes"]]
        return points.reshape(*points.shape[:-2], -1) * codes["norms"][..., None]


def rings():
    """Circles of 16 points, each a little turned: no vector of points is a multiple of another, which would cost the
    same with the best norm."""
    angle = np.arange(16) * (np.pi / 8)
    turned = [radius * np.exp(1j * (angle + radius / 9)) for radius in (0.4, 1.1, 1.8, 2.6)]
    return Table(np.concatenate(turned).astype(np.complex64).view(np.float32).reshape(-1, 2))


def levels(step=0.5, count=16):
    return Table(((np.arange(count) - (count - 1) / 2) * step)[:, None].astype(np.float32))


WIDTHS = {1: levels(), 2: rings()}
TABLES = pytest.mark.parametrize("codec", [rings(), levels()], ids=["pairs", "single"])
WITH_ROUNDING = [
    name for name in codecs.available() if codecs.get(name).rounding is not None and codecs.get(name).takes_metric
]


def covariance(*shape, seed=0, decay=0.8):
    """Positive definite (..., D, D) with a spectrum that falls by `decay` from one axis to the next."""
    axes, _ = np.linalg.qr(gaussian(*shape, seed=seed).astype(np.float64))
    return axes * decay ** np.arange(shape[-1]) @ axes.swapaxes(-1, -2)


def orthogonal(dim):
    return np.linalg.qr(gaussian(dim, dim, seed=9))[0]


def keys_metric(rounding, heads=2, dim=8):
    """A metric of keys in which every optional part is set."""
    smoothing = np.exp(0.3 * gaussian(heads, dim, seed=3))
    second = covariance(heads, dim, dim, seed=4).astype(np.float32)
    return key_metric(second, 0.2 * gaussian(heads, dim, seed=5), smoothing, orthogonal(dim), rounding)


def values_metric(rounding, heads=2, dim=8):
    output = gaussian(24, 2 * heads * dim, seed=6) * 0.8 ** np.arange(2 * heads * dim)
    return value_metric(output_second(output, heads, dim), orthogonal(dim), rounding)


def cost(errors, matrix):
    """errors (K, ..., D), matrix (K, D, D) → Σ e·M·eᵀ for each head, (K,)."""
    flat = errors.reshape(len(errors), -1, errors.shape[-1]).astype(np.float64)
    return np.einsum("krd,kde,kre->k", flat, matrix.astype(np.float64), flat)


# -- metrics -----------------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.sampled_from([1, 2]), st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_block_ldl_factors_the_metric(blocks, width, seed):
    dim = blocks * width
    second = covariance(3, dim, dim, seed=seed)
    metric = key_metric(second, np.zeros((3, dim)), np.ones((3, dim)), None, WIDTHS[width])
    lower = np.eye(dim) + metric.feedback  # M = lowerᵀ · diagonal blocks · lower
    solved = np.linalg.solve(lower.swapaxes(1, 2), remove_tilt(metric).matrix.astype(np.float64))
    squares = np.linalg.solve(lower.swapaxes(1, 2), solved.swapaxes(1, 2))
    block = np.arange(dim) // width
    inside = block[:, None] == block
    # The condition number of M is at most 1 + D / ridge, and so is |lower⁻¹|²: rounding of M and F grows by no more.
    assert np.abs(squares[:, ~inside]).max(initial=0) <= EPS * dim * (1 + dim / 0.05) * np.abs(metric.matrix).max()
    assert (np.linalg.eigvalsh(np.where(inside, squares, 0)) > 0).all()
    assert not metric.feedback[:, block[:, None] <= block].any()


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("is_fed_back", [True, False])
@pytest.mark.parametrize("is_tilted", [True, False])
def test_residues_cost_what_their_errors_cost(width, is_fed_back, is_tilted):
    dim, error = 12, gaussian(3, 5, 12)
    metric = key_metric(covariance(3, dim, dim), np.ones((3, dim)), np.ones((3, dim)), None, WIDTHS[width])
    metric = metric if is_tilted else remove_tilt(metric)
    factor, costs = residue_costs(metric if is_fed_back else remove_feedback(metric), width)
    np.testing.assert_allclose(factor, metric.feedback, rtol=1e-5, atol=1e-6)
    residues = (error + error @ factor.swapaxes(1, 2)).reshape(3, -1, dim // 2, 2)
    first, both, second, ridge = np.moveaxis(costs, 2, 0)[:, :, None]
    squares = first * residues[..., 0] ** 2 + 2 * both * residues.prod(-1) + second * residues[..., 1] ** 2
    assert (np.signbit(ridge) != is_fed_back).all()
    assert ((ridge != 0) == is_tilted).all()
    ridges = np.abs(ridge[..., 0]) * np.square(error).sum(-1)
    assert (squares.sum(-1) - ridges).sum(1) == pytest.approx(cost(error, metric.matrix), rel=1e-4)


def test_cost_of_a_key_error_is_its_change_of_scores():
    heads, dim = 2, 8
    q = gaussian(heads, 500, dim) @ covariance(heads, dim, dim).astype(np.float32) + 0.3
    smoothing, rotation = np.exp(gaussian(heads, dim, seed=1)), orthogonal(dim)
    second, mean = q.swapaxes(1, 2) @ q / 500, q.mean(1)
    metric = key_metric(second, mean, smoothing, rotation, rings())
    stored_error = gaussian(heads, 1, dim, seed=2)
    error = (stored_error @ rotation.T) * smoothing[:, None]
    scores = np.square(q @ error.swapaxes(1, 2)).mean((1, 2))
    ridge = 0.05 * np.trace(metric.matrix, axis1=1, axis2=2) / dim
    assert cost(stored_error, metric.matrix) == pytest.approx(scores, rel=1e-4)
    assert cost(stored_error, remove_tilt(metric).matrix) == pytest.approx(
        scores + ridge * np.square(stored_error).sum((1, 2))
    )
    as_stored = (q * smoothing[:, None]) @ rotation
    assert metric.tilt_mean == pytest.approx(as_stored.mean(1), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("rotated", [False, True])
def test_cost_of_a_value_error_is_its_change_of_the_output(rotated):
    kv_heads, group, dim = 2, 3, 8
    output = gaussian(20, kv_heads * group * dim)
    rotation = orthogonal(dim) if rotated else None
    metric = value_metric(output_second(output, kv_heads, dim), rotation, rings())
    stored_error = gaussian(kv_heads, 1, dim, seed=2)
    error = stored_error @ rotation.T if rotated else stored_error
    by_head = output.reshape(20, kv_heads, group, dim)
    changes = np.square(np.einsum("ekgd,kd->kge", by_head, error[:, 0])).sum(-1).mean(-1)
    ridge = 0.05 * np.square(by_head).sum((0, 2, 3)) / group / dim
    assert cost(stored_error, metric.matrix) == pytest.approx(changes + ridge * np.square(stored_error).sum((1, 2)))
    assert metric.tilt_mean is None


def test_the_metrics_of_several_layers_are_those_of_each():
    """To the bit: they are computed together, and the encoder must not depend on how many layers a model has."""
    layers, heads, dim = 3, 2, 8
    second, mean = covariance(layers, heads, dim, dim), gaussian(layers, heads, dim)
    scale, rotation = np.exp(gaussian(layers, heads, dim, seed=1)), orthogonal(dim)
    flat = heads * layers, dim
    for rounding in WIDTHS.values():
        keys = key_metric(second.reshape(*flat, dim), mean.reshape(flat), scale.reshape(flat), rotation, rounding)
        values = value_metric(second.reshape(*flat, dim), rotation, rounding)
        for layer, (k, v) in enumerate(zip(split_layers(keys, layers), split_layers(values, layers), strict=True)):
            single = key_metric(second[layer], mean[layer], scale[layer], rotation, rounding)
            assert_equal_metrics(k, single)
            assert_equal_metrics(v, value_metric(second[layer], rotation, rounding))


def assert_equal_metrics(a: Metric, b: Metric) -> None:
    for name, field in vars(a).items():
        np.testing.assert_array_equal(field, getattr(b, name))


# -- encoding against its definition, one vector at a time ---------------------------------------------------------


def without(metric, part):
    """The metric with one part switched off: "feedback" or "tilt"."""
    return remove_feedback(metric) if part == "feedback" else remove_tilt(metric)


def by_definition(codec, x, metric, feedback=True, tilt=True):
    """`encode_with_metric` in float64, one vector at a time → codes (K, B, N, P), norms (K, B, N)."""
    *lead, dim = x.shape
    metric = metric if tilt else remove_tilt(metric)
    codes, norms = np.zeros((*lead, dim // codec.width), int), np.zeros(lead)
    for head, block in np.ndindex(*lead[:2]):
        f = metric.feedback[head] if feedback else np.zeros_like(metric.feedback[head])
        for t, u in enumerate(x[head, block].astype(np.float64)):
            n, tried = np.sqrt(np.mean(u**2)), []
            for factor in encode.norm_factors(metric.tilt_mean is not None):
                code, y = rounded_by_definition(codec, u / (factor * n), f)
                norm = norm_of_least_cost(u, y, metric, head)
                tried.append((cost_of_error(u, u - norm * y, metric, head), code, norm))
            _, codes[head, block, t], norms[head, block, t] = min(tried, key=lambda one: one[0])
    return codes, norms


def rounded_by_definition(codec, unit, feedback):
    """unit (D,) → codes (P,), points (D,), chosen one after another."""
    codes, y = [], np.zeros_like(unit)
    for j in range(0, len(unit), codec.width):
        pair = slice(j, j + codec.width)
        target = unit[pair] + feedback[pair, :j] @ (unit - y)[:j]
        codes.append(np.square(codec.points - target).sum(1).argmin())
        y[pair] = codec.points[codes[-1]]
    return codes, y


def leaning(u, metric, head):
    """The second moment and the mean of the queries that attend to the key u."""
    second, mean = metric.matrix[head].astype(np.float64), metric.tilt_mean[head].astype(np.float64)
    return second, mean + u @ (second - np.outer(mean, mean)) / np.sqrt(len(u))


def cost_of_error(u, error, metric, head):
    matrix = metric.matrix[head].astype(np.float64)
    tilt = 0 if metric.tilt_mean is None else (error @ leaning(u, metric, head)[1]) ** 2
    return error @ matrix @ error + tilt


def norm_of_least_cost(u, y, metric, head):
    if metric.tilt_mean is None:
        matrix = metric.matrix[head].astype(np.float64)
        return max(0, (u @ matrix @ y) / (y @ matrix @ y))
    second, w = leaning(u, metric, head)
    tilted = (u @ second @ y + (u @ w) * (y @ w)) / (y @ second @ y + (y @ w) ** 2)
    plain = (u @ y) / (y @ y)
    return max(0, np.clip(tilted, 0.8 * plain, 1.25 * plain))


@TABLES
@in_turn("kind", [keys_metric, values_metric])
def test_codes_and_norms_match_the_definition(codec, kind):
    x = gaussian(2, 3, 16, 8, seed=7) * np.exp(gaussian(2, 3, 16, 1, seed=8))
    metric = kind(codec)
    for off in ("nothing", "feedback", "tilt"):
        encoded = encode_with_metric(codec, x, metric if off == "nothing" else without(metric, off))
        codes, norms = by_definition(codec, x, metric, **({} if off == "nothing" else {off: False}))
        assert np.array_equal(encoded["codes"], codes), off
        # A ratio of two sums of D² products, whose terms are about a hundred times larger than the sums.
        assert encoded["norms"] == pytest.approx(norms, rel=100 * 64 * EPS), off


# -- repeatability and edge cases ----------------------------------------------------------------------------------


@TABLES
@in_turn("kind", [keys_metric, values_metric])
def test_a_block_gets_the_same_codes_alone_as_among_others_except_at_edges(codec, kind, monkeypatch):
    x, metric = gaussian(2, 25, 16, 8), kind(codec)
    monkeypatch.setattr(encode, "_SLAB", 7 * 2 * 16 * 8)
    together = encode_with_metric(codec, x, metric)
    alone = [encode_with_metric(codec, x[:, block : block + 1], metric) for block in range(25)]
    codes = np.concatenate([one["codes"] for one in alone], axis=1)
    # A target within a few EPS of an edge may fall on either side and change the rest of its block: one in 10⁵ does.
    assert (codes == together["codes"]).all((2, 3)).mean() > 0.9


def test_without_a_metric_or_a_table_the_codec_encodes():
    x = gaussian(2, 3, 16, 16)
    for codec, metric in [(rings(), None), (codecs.get("polarquant"), keys_metric(rings(), dim=16))]:
        encoded, plain = encode_with_metric(codec, x, metric), codec.encode(x)
        assert all(np.array_equal(encoded[key], plain[key]) for key in plain)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_refuses_nan_and_infinity(bad):
    x = gaussian(2, 3, 16, 8)
    x[1, 2, 3, 4] = bad
    with pytest.raises(ValueError, match="not finite"):
        encode_with_metric(rings(), x, keys_metric(rings()))


# -- every codec that has a table ------------------------------------------------------------------------------------


def codec_and_metrics(name):
    codec = codecs.get(name)
    return codec, [keys_metric(codec.rounding, dim=32), values_metric(codec.rounding, dim=32)]


@in_turn("name", WITH_ROUNDING)
def test_errors_cost_less_than_those_of_plain_encoding(name):
    codec, metrics = codec_and_metrics(name)
    x = gaussian(2, 12, 16, 32)
    for metric in metrics:
        plain_norms = without(metric, "tilt")
        with_metric = cost(x - codec.decode(encode_with_metric(codec, x, plain_norms)), metric.matrix)
        assert (with_metric < 0.9 * cost(x - codec.decode(codec.encode(x)), metric.matrix)).all()


@in_turn("name", WITH_ROUNDING)
def test_zeros_stay_zero_beside_other_vectors(name):
    codec, metrics = codec_and_metrics(name)
    x = gaussian(2, 3, 16, 32)
    x[:, 1] = 0
    x[:, :, 5] = 0
    for metric in metrics:
        y = codec.decode(encode_with_metric(codec, x, metric))
        assert not y[:, 1].any()
        assert not y[:, :, 5].any()
        assert np.square(y - x).mean() < 0.5


@in_turn("name", WITH_ROUNDING)
def test_huge_and_tiny_vectors_stay_finite(name):
    codec, metrics = codec_and_metrics(name)
    for scale in (1e-38, 1e-20, 1e-10, 1e5, 1e10, 1e20, 3e37):
        x = gaussian(2, 3, 16, 32)
        x[:, 1] *= np.float32(scale)
        for metric in metrics:
            y = codec.decode(encode_with_metric(codec, x, metric))
            assert np.isfinite(y).all(), scale
            assert np.square(y[:, ::2] - x[:, ::2]).mean() < 0.5, scale  # the other blocks are not affected
