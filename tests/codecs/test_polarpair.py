"""PolarQuant by RoPE pairs against its paper and the authors' implementation."""

import numpy as np
import pytest

from polarlm.engine import codecs
from tests.codecs.data import gaussian, streams
from tests.pairs import each, in_turn

RADIUS_BITS = {"polarpair-m4n4": 4, "polarpair-m4n2": 2}
HEAD_DIMS = [8, 16, 48, 64, 80, 96, 128, 256]
VARIANTS = [name + option for name in RADIUS_BITS for option in ("", "+g16", "+minmax-radius", "+minmax+g32")]
every_name = pytest.mark.parametrize(("name", "n"), RADIUS_BITS.items())
every_variant = in_turn("name", VARIANTS)

EPS = np.finfo(np.float32).eps


def stored(codec, codes):
    """Codes of radius and angle, (N, D/2) each."""
    pairs = streams(codec, codes)["codes"]
    return pairs >> 4, pairs & 15


def polar(x):
    """x (..., D) → radius and angle in (−π, π] of channels 2j and 2j + 1, float64."""
    a, b = x[..., 0::2].astype(np.float64), x[..., 1::2].astype(np.float64)
    return np.hypot(a, b), np.arctan2(b, a)


@in_turn("name head_dim", each(RADIUS_BITS, HEAD_DIMS))
def test_codes_match_the_paper(name, head_dim):
    """§3.2 with θ = atan2 + π, in float64, from the stored scale."""
    n = RADIUS_BITS[name]
    x = gaussian(64, head_dim) * np.linspace(0.1, 10, head_dim, dtype=np.float32)
    codes = codecs.get(name).encode(x)
    radius, angle = polar(x)
    scale = codes["radius_step"].astype(np.float64)
    assert np.allclose(scale, radius.max(0) / (2**n - 1), rtol=2**-11 + 4 * EPS)
    theta, rho = 8 * (angle + np.pi) / np.pi, radius / scale
    radius_code, angle_code = stored(codecs.get(name), codes)
    for code, exact, expected in (
        (angle_code, theta, np.rint(theta) % 16),
        (radius_code, rho, np.clip(np.rint(rho), 0, 2**n - 1)),
    ):
        clear = np.abs(exact % 1 - 0.5) > 1e-4
        assert clear.mean() > 0.99
        assert (code == expected)[clear].all()


@every_name
@in_turn("option", ["+minmax", "+minmax-radius"])
def test_minmax_codes_match_the_authors_implementation(name, n, option):
    """Equal cells from the minimum of a group, by `floor`, in float64, from the stored scales."""
    x = gaussian(64, 64) + np.linspace(-8, 8, 64, dtype=np.float32)
    codes = codecs.get(name + option).encode(x)
    radius, angle = polar(x)
    parts = [("radius", radius, 2**n, stored(codecs.get(name + option), codes)[0])]
    if option == "+minmax":
        parts.append(("angle", angle % (2 * np.pi), 16, stored(codecs.get(name + option), codes)[1]))
    for part, exact, count, code in parts:
        low, step = (codes[f"{part}_{which}"].astype(np.float64) for which in ("low", "step"))
        assert np.allclose(low, exact.min(0), rtol=2**-11 + 4 * EPS, atol=1e-6)
        assert np.allclose(step, np.ptp(exact, axis=0) / count, rtol=2**-11 + 64 * EPS)
        cell = (exact - low) / step
        clear = np.abs(cell - np.round(cell)) > 1e-4
        assert clear.mean() > 0.99
        assert (code == np.clip(np.floor(cell), 0, count - 1))[clear].all()


@every_variant
def test_decode_is_the_formula(name):
    codes = codecs.get(name).encode(gaussian(64, 64) + 3)
    groups = len(codes["radius_step"])
    scales = {key: np.repeat(codes[key].astype(np.float64), 64 // groups, axis=0) for key in codes if key != "codes"}
    radius_code, angle_code = stored(codecs.get(name), codes)
    radius = radius_code * scales["radius_step"]
    angle = np.pi * angle_code / 8 - np.pi
    if "minmax" in name:
        radius += scales["radius_step"] / 2 + scales["radius_low"]
    if "angle_step" in codes:
        angle = (angle_code + 0.5) * scales["angle_step"] + scales["angle_low"]
    exact = np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1).reshape(64, 64)
    # Six roundings of the radius and the product, and of an angle of up to 2π before its cosine.
    assert np.allclose(codecs.get(name).decode(codes), exact, rtol=0, atol=(6 + 2 * np.pi * 3) * EPS * radius.max())


@every_variant
def test_rotation_permutes_channels(name):
    """Pair j of RoPE, channels j and j + D/2, is stored side by side, bit by bit, for any values."""
    x = gaussian(5, 80) * np.logspace(-30, 30, 80, dtype=np.float32)
    stored = x @ codecs.get(name).rotation(80)
    assert np.array_equal(stored[:, 0::2], x[:, :40])
    assert np.array_equal(stored[:, 1::2], x[:, 40:])


@pytest.mark.parametrize("options", ["g0", "g", "g-4", "minmax+minmax-radius", "g16+g32", "dense"])
def test_refuses_unknown_options_in_a_sentence(options):
    with pytest.raises(ValueError, match=r"polarpair-m4n2 has the options .*\.$"):
        codecs.get(f"polarpair-m4n2+{options}")
