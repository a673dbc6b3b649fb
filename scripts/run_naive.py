"""Runs `cuda/attention/naive.cu`, the attention over codes to read first, and checks it against NumPy in float64.

    python -m scripts.run_naive

takes the CUDA emulator of the tests, which needs g++ and no GPU; with TESTS_GPU=1 in the environment, the GPU.
Random keys and values of a few sequences become blocks as the engine has them: the first and the last in full
precision, the others as codes of ring4. One launch computes attention of one new token per sequence over them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from polarlm.engine import codecs
from polarlm.engine.backends.cuda.device.kernel_source import source
from polarlm.engine.codecs.parts.norms import ByteNorm
from polarlm.engine.codecs.ring import points_of
from polarlm.engine.quantization.conditioning import centre, read_mean

CODEC = codecs.get("ring4")
MEAN_BITS = 8


@dataclass(frozen=True)
class Setting:
    """B sequences, H query heads, K KV heads, D head dim, N tokens in a block.

    q (B, H, D) float32. k, v: for each sequence (K, T, D) float32, its last token the new one. Nothing is rotated yet.
    """

    q: np.ndarray
    k: list[np.ndarray]
    v: list[np.ndarray]
    block_size: int

    @property
    def lengths(self) -> list[int]:
        return [k.shape[1] for k in self.k]


@dataclass(frozen=True)
class Stored:
    """The kernel's arrays, and the decoded k, v (K, T, D) float64 of each sequence, rotated."""

    block_table: np.ndarray
    pools: tuple[np.ndarray, ...]
    k: list[np.ndarray]
    v: list[np.ndarray]


def random_setting(
    seed: int, lengths: list[int], heads: int = 4, kv_heads: int = 2, head_dim: int = 64, block_size: int = 16
) -> Setting:
    """Keys with a mean in each channel, as in models; queries that attend to few tokens."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    k = [normal(kv_heads, length, head_dim) + 2 * normal(kv_heads, 1, head_dim) for length in lengths]
    v = [normal(kv_heads, length, head_dim) for length in lengths]
    return Setting(2 * normal(len(lengths), heads, head_dim), k, v, block_size)


def store(setting: Setting) -> Stored:
    """Rotate, cut into blocks, and encode all but the first and the last of each sequence."""
    n, (kv_heads, _, dim) = setting.block_size, setting.k[0].shape
    rotation = CODEC.rotation(dim)
    counts = [-(-length // n) for length in setting.lengths]
    table = np.full((len(counts), max(counts)), -1, np.int32)
    quantized_keys, quantized_values, full_keys, full_values = [], [], [], []
    read_k, read_v = [], []
    for sequence, (k, v, count) in enumerate(zip(setting.k, setting.v, counts, strict=True)):
        turned_k, turned_v = k @ rotation, v @ rotation
        known_k, known_v = np.empty(k.shape), np.empty(v.shape)
        for block in range(count):
            part = slice(block * n, (block + 1) * n)
            own_k, own_v = turned_k[:, part], turned_v[:, part]
            if block in (0, count - 1):
                table[sequence, block] = len(full_keys)
                full = [np.full((kv_heads, n, dim), np.nan, np.float16) for _ in range(2)]
                full[0][:, : own_k.shape[1]], full[1][:, : own_v.shape[1]] = own_k, own_v
                full_keys.append(full[0])
                full_values.append(full[1])
                known_k[:, part], known_v[:, part] = own_k.astype(np.float16), own_v.astype(np.float16)
            else:
                table[sequence, block] = len(quantized_keys)
                centred, mean = centre(own_k, MEAN_BITS)
                keys, values = CODEC.encode(centred), CODEC.encode(own_v)
                quantized_keys.append((keys["codes"], keys["norm"], mean["mean"], mean["mean_scale"]))
                quantized_values.append((values["codes"], values["norm"]))
                known_k[:, part] = CODEC.decode(keys).astype(np.float64) + read_mean(mean)[:, None]
                known_v[:, part] = CODEC.decode(values)
        read_k.append(known_k)
        read_v.append(known_v)
    pools = [np.stack(pool) for pool in (*zip(*quantized_keys, strict=True), *zip(*quantized_values, strict=True))]
    return Stored(table, (*pools, np.stack(full_keys), np.stack(full_values)), read_k, read_v)


def launch(setting: Setting, stored: Stored) -> np.ndarray:
    """The kernel's output (B, H, D), rotated as the values are. One launch."""
    from tests.cuda.programs import Program  # chooses between emulator and GPU

    (sequences, heads, dim), kv_heads = setting.q.shape, len(setting.k[0])
    program = Program(source("naive", D=dim, BLOCK_SIZE=setting.block_size, GROUP=heads // kv_heads))
    out = np.full(setting.q.shape, np.nan, np.float32)
    q = setting.q @ CODEC.rotation(dim)
    tables = points_of(8), ByteNorm().unpack(np.arange(256, dtype=np.uint8))
    lengths = np.array(setting.lengths, np.int32)
    numbers = np.int32(stored.block_table.shape[1]), np.int32(kv_heads), np.float32(1 / np.sqrt(dim))
    args = out, q, stored.block_table, lengths, *stored.pools, *tables, *numbers
    program.launch("naive_attention_kernel", (heads, sequences), (32,), *args)
    return out


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: type = np.float64) -> np.ndarray:
    """q (H, D), k, v (K, T, D) → attention (H, D), computed in `dtype`."""
    grouped, k, v = (x.astype(dtype) for x in (q.reshape(len(k), -1, q.shape[-1]), k, v))
    scores = grouped @ k.swapaxes(1, 2) / dtype(np.sqrt(q.shape[-1]))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights @ v / weights.sum(-1, keepdims=True)).reshape(q.shape)


def errors(out: np.ndarray, setting: Setting, stored: Stored) -> Iterator[tuple[float, float, float]]:
    """For each sequence: the error of `out` from float64, its limit, and the change by quantization.

    It may be four times as far as NumPy in float32: sums are in another order, and points, norms and means are rounded
    apart from each other. Where few tokens leave that to luck, a rounding of the largest value stands in.
    """
    rotation = CODEC.rotation(setting.q.shape[-1])
    for row, q, k, v, full_k, full_v in zip(out, setting.q, stored.k, stored.v, setting.k, setting.v, strict=True):
        expected = attention(q @ rotation, k, v)
        rounding = np.abs(attention(q @ rotation, k, v, np.float32) - expected).max()
        allowed = 4 * max(rounding, np.finfo(np.float32).eps * np.abs(v).max())
        cost = np.abs(expected @ rotation.T - attention(q, full_k, full_v)).max()
        yield float(np.abs(row - expected).max()), float(allowed), float(cost)


def main() -> int:
    try:
        import pytest
    except ModuleNotFoundError:
        print(
            "error: the emulator belongs to the tests and needs their packages: run `make lint` once, "
            "or pip install '.[dev]'",
            file=sys.stderr,
        )
        return 1
    setting = random_setting(seed=0, lengths=[1, 16, 40, 333])
    stored = store(setting)
    try:
        out = launch(setting, stored)
    except pytest.skip.Exception as missing:
        print(missing, file=sys.stderr)
        return 1
    print("1 launch")
    print("tokens  quantized blocks  largest error  allowed  what the codes change")
    passed = True
    for length, (error, allowed, cost) in zip(setting.lengths, errors(out, setting, stored), strict=True):
        blocks = max(0, -(-length // setting.block_size) - 2)
        print(f"{length:6}  {blocks:16}  {error:13.1e}  {allowed:7.1e}  {cost:21.1e}")
        passed &= error <= allowed
    print("The kernel computes attention over the codes." if passed else "The kernel is wrong.")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
