"""Tiles of `polarquant`: keys in `parts.polar_keys`, values in `parts.polar_values`, their layout in `parts.polar`.

A value is radius · factor · direction: the radius of its unit of 16 channels (of its half of 8, with three levels); the
factor of its pair, the product of the cosines and sines of levels 2 and up; and the cosine or sine of level 1.
"""

from __future__ import annotations

from polarlm.engine.backends.native.codecs.parts.polar_keys import PolarKeys
from polarlm.engine.backends.native.codecs.parts.polar_values import PolarValues

keys, values = PolarKeys, PolarValues
