"""Taps of the forward pass: the values that they get, and how they find where two backends differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.model.forward import Transformer
from tests.bare import bare_model, feed, read_model
from tests.conftest import FIXTURES
from tests.cuda.emulated import open_device
from tests.cuda.test_model_emulated import Rounded, SameWeights, Talk, model_of

NAMES = ["input", "queries", "keys", "attention"]
IDS = [1, *np.random.default_rng(5).integers(5, 96, 43).tolist()]
FIRST = 30  # tokens of the first prompt; the rest is a second one

Seen = dict[tuple[int, str, int], np.ndarray]  # layer, name, position → a copy on the host


class Keep:
    """Taps that keep all values, and replace the input of every layer with its value in `inputs`, if any."""

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


def differences(on_device: Seen, exact: Seen, rounded: Seen) -> Iterator[tuple[int, str]]:
    """(layer, name), in the order of the forward pass, where the two differ by more than rounding allows.

    `rounded`: the values on the CPU with the kernels' roundings. Kernels round in other places as well, so four times
    the error is allowed.
    """
    assert on_device.keys() == exact.keys() == rounded.keys()
    for layer, name, position in sorted(exact, key=lambda at: (at[2], at[0], NAMES.index(at[1]))):
        at = layer, name, position
        rounding = max(np.abs(rounded[at] - exact[at]).max(), 2.0**-11 * np.abs(exact[at]).max())
        if not np.abs(on_device[at] - exact[at]).max() <= 4 * rounding:
            yield layer, name


def first_difference(fixture: str) -> tuple[int, str] | None:
    """The first values in which the emulated GPU differs from NumPy."""
    device = CudaOps(open_device(checked=False))
    models = [model_of(ops, fixture, ("f16", "f16")) for ops in (SameWeights(device), Rounded(device), device)]
    exact = values(models[0])
    rounded, on_device = (values(model, exact) for model in models[1:])
    return next(differences(on_device, exact, rounded), None)


FIXTURE = "qwen3_qk_norm_tied"


@pytest.mark.slow
@pytest.mark.parametrize("fixture", ["gemma3_tied", "gpt_oss_mxfp4", "qwen3_5_tied", FIXTURE])
def test_two_backends_agree_at_every_tap(fixture: str) -> None:
    """The emulated GPU takes seconds for each model."""
    assert first_difference(fixture) is None


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
