"""`linear` with packed weights, against the dequantized weights in float64."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from polarlm.engine.backends.native.kernels.linear.tiling import largest_tiling
from polarlm.engine.backends.native.launch import Launcher
from polarlm.engine.backends.native.product_ops.linear import LinearOps
from polarlm.engine.backends.numpy.activations import ACTIVATIONS
from polarlm.engine.backends.numpy.rows import rms_norm
from polarlm.engine.jit.compile import library as library_module
from polarlm.engine.jit.compile.compiler import compile_object
from polarlm.engine.jit.compile.library import Library
from polarlm.engine.jit.compile.target import best
from polarlm.engine.jit.lang import Kernel, Level
from polarlm.engine.weight_formats import Linear
from polarlm.model_loaders.config import is_gated
from tests import weights
from tests.backends.native.launching import launcher
from tests.jit.levels import some_levels


@pytest.mark.parametrize(("formats", "rows"), [(("q4_1", "q4_1"), 1), (("q6_k", "q8_0"), 5), (("iq4_xs", "q5_k"), 40)])
def test_rounding_the_inputs_to_words_costs_a_ten_thousandth_at_most(formats: tuple[str, str], rows: int) -> None:
    """Inputs have outliers, as in language models."""
    rng = np.random.default_rng(0)
    stored = [weights.random_matrix(rng, name, 64, 256) for name in formats]
    x = (rng.standard_normal((rows, 256)) * rng.lognormal(0, 1, 256)).astype(np.float32)
    norm = rng.standard_normal(256).astype(np.float32), 1e-5
    values = np.concatenate([matrix.values for matrix in stored]).astype(np.float64)
    want = rms_norm(x, *norm).astype(np.float64) @ values.T
    ops = LinearOps(Launcher(1))
    got = ops.linear(x, Linear(ops.load(stored)), norm=norm)
    assert np.linalg.norm(got - want) < 1e-4 * np.linalg.norm(want)


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_damaged_numbers_and_zeros_are_seen_in_words(name: str) -> None:
    """A number that is not finite makes the outputs of its row so, and no other one; zeros make zeros."""
    rng = np.random.default_rng(7)
    values = rng.standard_normal((64, 256)).astype(np.float32)
    values[3], values[4, 64:96] = 0, 0
    sound = weights.pack(values, name)
    damaged = sound.reshape(64, -1, 2).copy()
    damaged[5, 70], damaged[6, 255] = ([0, 0x7C], [1, 0xFE]) if name == "f16" else ([0x80, 0x7F], [0xC1, 0xFF])
    ops, x = LinearOps(Launcher(1)), rng.standard_normal((7, 256)).astype(np.float32)
    matrices = [weights.StoredBytes(raw.reshape(64, -1), name) for raw in (sound, damaged)]
    of_sound, of_damaged = (ops.linear(x, Linear(ops.load([matrix]))).copy() for matrix in matrices)
    assert not np.isfinite(of_damaged[:, 5:7]).any()
    others = [output for output in range(64) if output not in (5, 6)]
    np.testing.assert_array_equal(of_damaged[:, others], of_sound[:, others])
    assert not of_sound[:, 3].any()
    np.testing.assert_allclose(of_sound[:, 4], x.astype(np.float64) @ matrices[0].values[4], rtol=1e-3, atol=1e-2)


@some_levels
def test_a_row_with_a_number_that_is_not_finite_has_no_finite_result(level: Level) -> None:
    """And no other row is touched."""
    rng = np.random.default_rng(4)
    ops, x = LinearOps(launcher(level)), rng.standard_normal((3, 256)).astype(np.float32)
    w = Linear(ops.load([weights.random_matrix(rng, "q4_k", 32, 256)]))
    for norm in (None, (np.ones(256, np.float32), 1e-5)):
        sound = ops.linear(x, w, norm=norm).copy()
        for value in (np.nan, -np.nan, np.inf, -np.inf):
            damaged = x.copy()
            damaged[1, 77] = value
            actual = ops.linear(damaged, w, norm=norm)
            assert not np.isfinite(actual[1]).any(), (value, norm)
            np.testing.assert_array_equal(actual[[0, 2]], sound[[0, 2]])


@some_levels
def test_inputs_of_any_size_are_multiplied_rightly(level: Level) -> None:
    """In a group whose largest input is at most 1e-34 all count as 0: words for them would take an infinite factor."""
    rng = np.random.default_rng(5)
    stored = weights.random_matrix(rng, "q4_k", 48, 256)
    ops, values = LinearOps(launcher(level)), stored.values.astype(np.float64)
    w, x = Linear(ops.load([stored])), rng.uniform(-1, 1, (7, 256))
    x[:, ::32] = 1  # the largest of each group
    x = (x * np.float64([[1e30], [1e-30], [1.1e-34], [1e-40], [0.9e-34], [1e-37], [0]])).astype(np.float32)
    x[3, 32:] = rng.uniform(-1, 1, 224)  # beside groups of usual size
    actual, wanted = ops.linear(x, w).astype(np.float64), x.astype(np.float64) @ values.T
    error, size = (np.linalg.norm(rows, axis=1) for rows in (actual - wanted, wanted))
    assert (error[:4] < 1e-4 * size[:4]).all()
    assert not actual[4:].any()


@pytest.mark.parametrize("bits", [8, 16])
def test_products_are_repeated_with_other_rows(bits: int) -> None:
    """To the bit what a product is that nothing was kept of: with other rows, their number and results, parts in two
    formats, a norm and a bias."""
    rng = np.random.default_rng(8)
    stored = [weights.random_matrix(rng, name, 64, 256) for name in ("q4_k", "q6_k", "q4_k")]
    bias, norm = rng.standard_normal(192).astype(np.float32), (rng.standard_normal(256).astype(np.float32), 1e-5)
    ops = LinearOps(Launcher(2))
    ops._launch.input_bits = bits
    whole, first = Linear(ops.load(stored), bias), Linear(ops.load(stored[:1]))
    for rows in (40, 40, 41, 7, 1, 100, 1, 40):
        x, y = (rng.standard_normal((rows, size)).astype(np.float32) for size in (256, 64))
        other = LinearOps(Launcher(2))
        other._launch.input_bits = bits
        sums = [y.copy(), y.copy()]
        for number, one in enumerate((ops, other)):
            assert one.linear(x, first, residual=sums[number]) is sums[number]
        np.testing.assert_array_equal(*sums)
        np.testing.assert_array_equal(ops.linear(x, whole, norm=norm), other.linear(x, whole, norm=norm))
        gated = [one.linear(x, first, activation="silu").copy() for one in (ops, other)]
        np.testing.assert_array_equal(*gated)


@pytest.mark.skipif(best().lanes < 8, reason="kernels of this level take one row or two, which are the most")
def test_prompts_do_not_wait_for_the_kernels_of_their_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take the kernels of many rows meanwhile, with the same results; steps, which are recorded, wait."""
    rng = np.random.default_rng(3)
    may_compile = threading.Event()
    (most, tiles, _), rows = largest_tiling(best()), {16: 5, 8: 2}[best().lanes]

    def slow(kernel: Kernel, level: Level) -> bytes:
        assert may_compile.wait(120)
        return compile_object(kernel, level)

    launch = Launcher(1)
    launch.library = Library(launch.level, None)
    stored = weights.random_matrix(rng, "q5_1", 48, 64)
    ops, x = LinearOps(launch), rng.standard_normal((rows, 64)).astype(np.float32)
    w = Linear(ops.load([stored]))
    ops.linear(np.zeros((48, 64), np.float32), w)
    with monkeypatch.context() as patch:
        patch.setattr(library_module, "compile_object", slow)
        early = ops.linear(x, w).copy()
        of_rows = {name for name in launch.library.names if not name.startswith("pack_")}
        assert of_rows == {f"quantize_{most}", f"product_q5_1_{most}" + f"x{tiles}" * (tiles > 1)}
        may_compile.set()
        with launch.graph():
            late = ops.linear(x, w).copy()
    assert f"product_q5_1_{rows}" in launch.library.names
    np.testing.assert_array_equal(early, late)
    np.testing.assert_array_equal(ops.linear(x, w), late)


@some_levels
def test_logits_are_capped_in_place(level: Level) -> None:
    """The rows may be columns of a wider array; a recorded step may have the op. The cap hides no infinity."""
    rng, launch = np.random.default_rng(0), launcher(level, 2)
    wide = (30 * rng.standard_normal((3, 9000))).astype(np.float32)
    wide[0, :4] = 0, -1e30, np.inf, np.nan
    before, x = wide.astype(np.float64), wide[:, :8999]
    with launch.record() as recording:
        LinearOps(launch).softcap(x, 30.0)
    (together,) = recording.parts
    assert len(together.launches) == 1
    LinearOps(launch).softcap(x, 30.0)
    expected = 30 * np.tanh(before[:, :8999] / 30)
    expected[0, 2] = np.nan
    np.testing.assert_allclose(x, expected, atol=30 * 2e-7)
    np.testing.assert_array_equal(wide[:, 8999], before[:, 8999])


@some_levels
def test_rows_are_scaled_and_activated_in_place(level: Level) -> None:
    """By a number in memory, or one for each row, and with columns of a wider array."""
    rng, ops = np.random.default_rng(0), LinearOps(launcher(level, 2))
    x, wide, factor = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 50), (3, 150), (1,)))
    scaled = x.copy()
    ops.scale(scaled, factor)
    ops.scale(scaled[:, :40], x[:, 40:41])
    np.testing.assert_array_equal(scaled[:, 40:], (x * factor)[:, 40:])
    np.testing.assert_array_equal(scaled[:, :40], (x * factor)[:, :40] * x[:, 40:41])
    for activation, function in ACTIVATIONS.items():
        actual = x.copy()
        if is_gated(activation):
            ops.activate(actual, wide[:, 50:100], activation)
            wanted = function(np.concatenate([x, wide[:, 50:100]], axis=1))
        else:  # the square of a ReLU is its product with what it was of
            ops.activate(actual, actual, activation)
            wanted = function(x)
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6)
