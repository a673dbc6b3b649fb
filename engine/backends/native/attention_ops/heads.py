"""The ops for QK-norm, RoPE, scale and rotation of heads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polarlm.engine.backends.hadamard import hadamard_signs, with_rotations
from polarlm.engine.backends.kv import HeadRule, HeadTransform, Move, Rope, SpanView
from polarlm.engine.backends.native.attention_ops.step_table import StepTable
from polarlm.engine.backends.native.kernels.heads import (
    HeadArguments,
    HeadsSpec,
    JoinArguments,
    SlotArguments,
    TakeArguments,
    join_heads,
    take_latents,
    to_slot,
    transform,
)
from polarlm.engine.backends.native.launch import KernelOps
from polarlm.engine.backends.numpy.kv.cache import LayerCache


@dataclass(frozen=True, eq=False)
class Rotation:
    """A rotation as kernels apply it.

    order 0: a product with memory (D, D). order 1: no rotation. order ≥ 2: x · input_signs (D,), then D/order Hadamard
    matrices, then · memory (D,): the signs after them, divided by √order.
    """

    order: int
    memory: np.ndarray
    input_signs: np.ndarray | None = None


NO_ROTATION = Rotation(1, np.zeros(1, np.float32))


@dataclass(frozen=True, eq=False)
class PreparedTransform(HeadTransform):
    """A `HeadTransform`, and what its kernels read. inverse: of the rotation `values`.

    key_factor (H + K or 1, D), value_factor (K or 1, D): the scale times the signs before a Hadamard matrix, with one
    row if all heads share it; None without scale and signs.
    """

    keys: Rotation = NO_ROTATION
    values: Rotation = NO_ROTATION
    inverse: Rotation = NO_ROTATION
    key_factor: np.ndarray | None = None
    value_factor: np.ndarray | None = None


class HeadOps(KernelOps):
    def join_latents(self, absorbed: np.ndarray, rotated: np.ndarray, kv: np.ndarray) -> np.ndarray:
        (rows, columns), size, heads = kv.shape, rotated.shape[1], len(absorbed) // len(kv)
        joined = self._launch.empty((rows, heads + 1, columns))
        self._join(absorbed, rotated, joined[:, :heads])
        self._join(kv[:, : columns - size], kv[:, columns - size :], joined[:, heads:])
        return joined

    def _join(self, own: np.ndarray, rotated: np.ndarray, joined: np.ndarray) -> None:
        """own (T·H, L), and rotated (T·H, R), or (T, H, 2, R / 2) anywhere, → joined (T, H, columns)."""
        rows, heads, columns = joined.shape
        own = own.reshape(rows, heads, own.shape[1])
        if rotated.ndim == 2:
            rotated = rotated.reshape(rows, heads, 2, rotated.shape[1] // 2)
        sizes = own.shape[2], *own.strides[:2], 2 * rotated.shape[3], *rotated.strides[:3], columns, *joined.strides[:2]
        self._launch(join_heads(), rows * heads, JoinArguments(own, rotated, joined, heads, *sizes))

    def take_latents(self, x: np.ndarray, latent: int) -> np.ndarray:
        tokens, heads, columns = x.shape
        out = self._launch.empty((tokens * heads, latent))
        self._launch(take_latents(), tokens * heads, TakeArguments(x, out, columns, latent))
        return out

    def prepare(self, transforms: Sequence[HeadTransform]) -> list[PreparedTransform]:
        return [_prepare_transform(*one) for one in with_rotations(transforms, _rotation, NO_ROTATION)]

    def transform_heads(self, qkv: np.ndarray, rope: Rope, rule: HeadRule) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        sides = 1 if rule.transform.values_are_keys else 2
        k, *v = (self._launch.empty((len(qkv), rule.transform.kv_heads, qkv.shape[2])) for _ in range(sides))
        return self.transform_into(qkv, rope, rule, (k, v[0] if v else k)), k, v[0] if v else k

    def place_kv(
        self, qkv: np.ndarray, rope: Rope, rule: HeadRule, cache: LayerCache, spans: StepTable | Sequence[SpanView]
    ) -> np.ndarray:
        if isinstance(spans, StepTable):
            full = cache.full_k, cache.full_v
            return self.transform_into(qkv, rope, rule, full, spans.arrays.places)
        place, first = spans[0].current, spans[0].position - spans[0].current_start
        k, v = cache.full(place)
        # Rows of several prompts are not in a row in their buffer; further spans of one are behind ends of images.
        # Slots are halves: of tokens that are recomputed exactly as steps have computed them.
        if spans[-1].current.block != place.block or k.dtype == np.float16:
            q, new_k, new_v = self.transform_heads(qkv, rope, rule)
            self.append_kv(cache, spans, new_k, new_v)
            return q
        targets = k[:, first:].swapaxes(0, 1), v[:, first:].swapaxes(0, 1)
        return self.transform_into(qkv, rope, rule, targets)

    def append_kv(self, cache: LayerCache, spans: StepTable | Sequence[SpanView], k: np.ndarray, v: np.ndarray) -> None:
        self._launch.run_numpy(super().append_kv, cache, spans, k, v)

    def copy_full(self, caches: Sequence[LayerCache], moves: Sequence[Move]) -> None:
        """By NumPy, except where a prompt's float32 is rounded into a slot: NumPy is many times slower at that."""
        for cache, move in itertools.product(caches, moves):
            (k, v), (to_k, to_v) = cache.full(move.source), cache.full(move.target)
            if k.dtype == to_k.dtype or to_k.dtype != np.float16:
                self._launch.run_numpy(super().copy_full, [cache], [move])
                continue
            strides = {"from_stride": k.strides[0], "to_stride": to_k.strides[0]}
            arguments = SlotArguments(from_k=k, from_v=v, to_k=to_k, to_v=to_v, tokens=move.tokens, **strides)
            self._launch(to_slot(cache.format.head_dim), len(k), arguments)

    def transform_into(
        self,
        qkv: np.ndarray,
        rope: Rope,
        rule: HeadRule,
        targets: tuple[np.ndarray, np.ndarray],
        places: np.ndarray | None = None,
    ) -> np.ndarray:
        """`transform_heads` whose keys and values go to `targets`, with the same strides → the queries (T, H, D).

        targets: (at least T, K, D) float32; with places, the `RowPlace` of each row, slots (slots, K, N, D) float16.
        """
        prepared: PreparedTransform = rule.transform
        rows, heads, dim = qkv.shape
        kv_heads = prepared.kv_heads
        queries = heads - kv_heads * (1 if prepared.values_are_keys else 2)
        alone = kv_heads == 0
        q = self._launch.empty((rows, queries, dim))
        factors = prepared.key_factor, prepared.value_factor
        spec = HeadsSpec(
            dim,
            rule.norms is not None,
            (factors[0] is not None, prepared.keys.order),
            (factors[1] is not None, prepared.values.order),
            places is not None,
            prepared.value_eps is not None,
            alone,
            prepared.values_are_keys,
        )
        q_norm, k_norm, eps = rule.norms or (None, None, 0.0)
        (cos, sin), (k, v), (row_stride, head_stride, *_) = rope, targets, targets[0].strides
        steps = [0 if factor is None or len(factor) == 1 else factor.strides[0] for factor in factors]
        arguments = HeadArguments(
            qkv=qkv,
            cos=cos,
            sin=sin,
            q_norm=q_norm,
            k_norm=k_norm,
            key_factor=None if factors[0] is None else factors[0][-heads:],  # there may be no queries
            value_factor=prepared.value_factor,
            key_rotation=prepared.keys.memory,
            value_rotation=prepared.values.memory,
            q=q,
            k=k,
            v=v,
            places=places,
            group=queries if alone else queries // kv_heads,
            kv_heads=1 if alone else kv_heads,
            row_stride=row_stride,
            head_stride=head_stride,
            key_factor_stride=steps[0],
            value_factor_stride=steps[1],
            eps=eps,
            value_eps=prepared.value_eps or 0.0,
        )
        self._launch(transform(spec), rows if alone else rows * kv_heads, arguments)
        return q


def _rotation(matrix: np.ndarray) -> Rotation:
    """The rotation by matrix (D, D) float32: signs where it is a signed Hadamard matrix, else the dense matrix."""
    signs = hadamard_signs(matrix)
    if signs is None:
        return Rotation(0, np.ascontiguousarray(matrix, np.float32))
    return Rotation(signs.order, signs.output_signs / np.sqrt(np.float32(signs.order)), signs.input_signs)


def _prepare_transform(
    transform: HeadTransform, keys: Rotation, values: Rotation, inverse: Rotation
) -> PreparedTransform:
    scale = transform.scale
    key_scale, value_scale = (None, None) if scale is None else np.split(scale, [len(scale) - transform.kv_heads])
    return PreparedTransform(
        **vars(transform),
        keys=keys,
        values=values,
        inverse=inverse,
        key_factor=factor_of(key_scale, keys.input_signs),
        value_factor=factor_of(value_scale, values.input_signs),
    )


def factor_of(scale: np.ndarray | None, signs: np.ndarray | None) -> np.ndarray | None:
    """scale (heads, D) times signs (D,), where None counts as ones; None if both are."""
    if scale is None:
        return None if signs is None else signs[None]
    return np.ascontiguousarray(scale if signs is None else scale * signs, np.float32)
