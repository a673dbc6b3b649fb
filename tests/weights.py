"""Weights of the CPU, from arrays."""

from __future__ import annotations

import numpy as np

from engine.weight_formats import Linear, Matrix, get


def matrix(x: np.ndarray) -> Matrix:
    """x (out, in), in its own precision."""
    return Matrix(get("f32"), x, x.shape)


def linear(x: np.ndarray, bias: np.ndarray | None = None) -> Linear:
    """x (out, in), bias (out,)."""
    return Linear((matrix(x),), bias)
