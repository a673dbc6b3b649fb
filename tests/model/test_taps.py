"""Taps of the forward pass: the values that they get, and how they find where two backends differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.model.forward import Transformer
from tests.bare import bare_model, feed, read_model
from tests.conftest import FIXTURES
from tests.cuda.emulated import open_device
from tests.cuda.test_model_emulated import Rounded, SameWeights, Talk, model_of
from tests.weights import load

NAMES = ["input", "queries", "keys", "attention"]
IDS = [1, *np.random.default_rng(5).integers(5, 96, 43).tolist()]
FIRST = 30  # tokens of the first prompt; the rest is a second one

Seen = dict[tuple[int, str, int], np.ndarray]  # layer, name, position → a copy on the host


class Keep:
    """Taps that keep all values, and replace the input of every layer by that of `inputs`, if any."""

    def __init__(self, model: Transformer, inputs: Seen | None = None):
        self.model, self.inputs, self.seen = model, inputs or {}, Seen()

    def __call__(self, name: str, layer: int, position: int, x) -> None:
        self.seen[layer, name, position] = np.array(self.model.ops.to_host(x))
        if name == "input" and self.inputs:
            x[...] = self.model.ops.to_device(self.inputs[layer, name, position])


def values(model: Transformer, inputs: Seen | None = None) -> Seen:
    """The values that taps get from two prompts of a sequence."""
    model.taps = keep = Keep(model, inputs)
    talk = Talk(model)
    talk.prompt(IDS[:FIRST])
    talk.prompt(IDS[FIRST:])
    return keep.seen


def differences(given: Seen, exact: Seen, rounded: Seen) -> Iterator[tuple[int, str]]:
    """(layer, name), in the order of the forward pass, where `given` differs from `exact` by more than rounding allows.

    `rounded`: the values on the CPU with the kernels' roundings. Kernels round in other places as well, so four times
    the error is allowed.
    """
    assert given.keys() == exact.keys() == rounded.keys()
    for layer, name, position in sorted(exact, key=lambda at: (at[2], at[0], NAMES.index(at[1]))):
        at = layer, name, position
        rounding = max(np.abs(rounded[at] - exact[at]).max(), 2.0**-11 * np.abs(exact[at]).max())
        if not np.abs(given[at] - exact[at]).max() <= 4 * rounding:
            yield layer, name


def first_difference(fixture: str, *, break_layer: int | None = None, part: str = "") -> tuple[int, str] | None:
    """The first values in which the emulated GPU differs from NumPy after a change to a matrix of the GPU's model."""
    device = CudaOps(open_device(checked=False))
    models = [model_of(ops, fixture, ("f16", "f16")) for ops in (SameWeights(device), Rounded(device), device)]
    if break_layer is not None:
        weights = models[-1].weights
        layers = list(weights.layers)
        kind = "mixer" if part in ("qkv", "out") else "ffn"
        owner = getattr(layers[break_layer], kind)
        whole = getattr(owner, part)
        bent = device.rows(whole).copy()
        bent[-1, :] *= 1.5
        changed = replace(whole, parts=(load(device, bent, "f16"),))
        layers[break_layer] = replace(layers[break_layer], **{kind: replace(owner, **{part: changed})})
        models[-1].weights = replace(weights, layers=layers)
    exact = values(models[0])
    rounded, given = (values(model, exact) for model in models[1:])
    return next(differences(given, exact, rounded), None)


FIXTURE = "qwen3_qk_norm_tied"


# A GPU has no kernel of Mamba 2 yet.
ON_A_GPU = [
    path.name for path in FIXTURES.iterdir() if "granite_hybrid" not in path.name and "nemotron" not in path.name
]


@pytest.mark.slow
@pytest.mark.parametrize("fixture", sorted(ON_A_GPU)[::8])
def test_two_backends_agree_at_every_tap(fixture: str) -> None:
    assert first_difference(fixture) is None


@pytest.mark.parametrize(
    ("layer", "part", "found"),
    [
        (1, "qkv", (1, "attention")),  # its last row is one of a value: attention shows it first
        (0, "out", (1, "input")),
        (0, "down", (1, "input")),
    ],
)
def test_the_first_value_that_differs_is_named(layer: int, part: str, found: tuple[int, str]) -> None:
    assert first_difference(FIXTURE, break_layer=layer, part=part) == found


def seen_by(model: Transformer, ids: Sequence[int]) -> tuple[Seen, np.ndarray]:
    model.taps = keep = Keep(model)
    logits = feed(model, model.store.new_sequence(), ids)
    return keep.seen, logits


def test_taps_get_every_row_of_every_layer_once_whatever_the_units(monkeypatch: pytest.MonkeyPatch) -> None:
    config, weights = read_model(FIXTURES / FIXTURE)
    whole, logits = seen_by(bare_model(config, weights), IDS)
    assert sorted(whole) == sorted((layer, name, 0) for layer in range(len(config.layers)) for name in NAMES)
    model = bare_model(config, weights)
    np.testing.assert_array_equal(feed(model, model.store.new_sequence(), IDS), logits)  # without taps
    monkeypatch.setattr(NumpyOps, "prefill_rows", 16)
    parts, _ = seen_by(bare_model(config, weights), IDS)
    for layer in range(len(config.layers)):
        for name in NAMES:
            rows = [(at[2], x) for at, x in parts.items() if at[:2] == (layer, name)]
            joined = np.concatenate([x for _, x in sorted(rows, key=lambda row: row[0])])
            np.testing.assert_allclose(joined, whole[layer, name, 0], rtol=1e-4, atol=1e-4)
