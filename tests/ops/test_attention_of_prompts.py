"""Attention of the rows of prompts on every backend, against float64; `tests.ops.attending` has what each may be off
by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.engine.backends.cuda import launch_configs
from polarlm.engine.backends.kv import HeadTransform
from polarlm.engine.codecs.parts.rotation import dense, signed_hadamard, twice_signed_hadamard
from polarlm.engine.errors import KernelError
from tests.ops.attending import Case, Sequence_, Shape, case_of
from tests.ops.backends import BEST, CUDA, MATRICES, NUMPY, SOME, Backend, backend_cases, backends
from tests.pairs import each

N = 32  # tokens of a block, where nothing else is said
DECODED = "polarlm.engine.backends.native.attention_ops.prompts._DECODED"  # tokens of blocks decoded at a time
POOL = "polarlm.engine.backends.native.attention_ops.prompts.MOST"  # bytes of keys and values of a launch
prompt_case = partial(case_of, is_prompt=True)


@pytest.fixture(autouse=True)
def _few_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    use_warps(monkeypatch, 2, 16)


def use_warps(monkeypatch: pytest.MonkeyPatch, warps: int, rows: int) -> None:
    """Of a GPU's blocks of threads, and their rows: smaller blocks than the engine's, for the emulator's sake."""
    monkeypatch.setattr(launch_configs, "prefill_attention", partial(launch_configs.prefill_blocks, warps, rows))


def prompt_rows(blocks: int, rows: int, done: int) -> list[Sequence_]:
    """A prompt of `rows`, `done` rows after the first of its own: after a sink and quantized blocks.

    No blocks: the prompt begins the sequence.
    """
    return [Sequence_(((blocks + 1) * N if blocks else 0) + done, rows, done)]


def last_rows(rows: int, tokens: int) -> list[Sequence_]:
    """The last rows of a sequence of so many tokens are the prompt."""
    return [Sequence_(tokens - rows, rows)]


def check_orders(case: Case, seeds: Sequence[int] = (0, 1, 2)) -> None:
    """Check the result of a GPU in several orders of threads and of their blocks."""
    for case.ops._device.seed in seeds:
        case.check(case.attended())


def with_transform(case: Case, rotation: np.ndarray | None, *, is_scaled: bool) -> Case:
    heads, kv_heads = case.q.shape[1], case.cache.format.kv_heads
    factors = np.repeat(np.random.default_rng(1).uniform(0.5, 2, kv_heads), heads // kv_heads).astype(np.float32)
    return replace(case, transform=HeadTransform(kv_heads, None, None, rotation, factors if is_scaled else None))


POLAR = Shape(("polarquant", "polarquant"), 64, 3, N)
PROMPTS = [
    (POLAR, signed_hadamard, prompt_rows(6, 100, 70), None),
    (POLAR._replace(dim=80, group=1), signed_hadamard, prompt_rows(0, 33, 0), 20),
    (POLAR._replace(dim=8, group=8), signed_hadamard, prompt_rows(5, 30, 65), 90),
    (POLAR._replace(dim=512), signed_hadamard, prompt_rows(2, 33, 20), None),  # the widest heads that kernels have
]
# Of products of matrices: all numbers of queries in the last one, tokens that fill no tile, and tiles that some see.
MORE_PROMPTS = [
    (POLAR._replace(dim=16, group=1), None, prompt_rows(0, 31, 0), None),
    (POLAR._replace(dim=128, group=5), dense, prompt_rows(3, 15, 64), 100),
    (POLAR._replace(dim=112, group=7, kv_heads=1), None, prompt_rows(9, 1, 0), None),
    (POLAR._replace(dim=256, group=12, kv_heads=1), None, prompt_rows(2, 70, 30), 33),
    (POLAR._replace(block_size=64), signed_hadamard, prompt_rows(9, 40, 10), 150),
]
HALVES = Shape(("f16", "f16"), 16, 2, 16, 0)
ROTATIONS = [signed_hadamard, twice_signed_hadamard, dense, None]


@backend_cases(
    "ops shape rotation sequences window",
    [
        *((NUMPY, *case) for case in PROMPTS),
        *((backend, *case) for backend, case in each(SOME or [NUMPY], PROMPTS)),
        *((backend, *case) for backend in MATRICES for case in PROMPTS[:2]),
        *((backend, *case) for backend in [*BEST, *MATRICES] for case in MORE_PROMPTS),
        *((CUDA, HALVES, rotation, last_rows(20, 40), None) for rotation in ROTATIONS),
    ],
    slow=[(backend, *case) for backend in SOME for case in PROMPTS],
)
def test_a_prompt_attends(
    ops: Any, shape: Shape, rotation: Any, sequences: list[Sequence_], window: int | None
) -> None:
    """The result is scaled and rotated back."""
    case = prompt_case(ops, shape, sequences, window)
    case = with_transform(case, rotation and rotation(shape.dim), is_scaled=True)
    case.check(case.attended())


# Keys, values, head dim, query heads of a KV head, block size, bits of means; tokens, new rows.
CODED = [
    (Shape(("ring4", "ring3.5"), 64, 2, 64, 8, 1), 205, 20),
    (Shape(("ring3", "ring4"), 128, 1, 32, 16, 1), 150, 10),
    (Shape(("ring5", "turbo3"), 80, 3, 16, 8, 1), 90, 12),
    (Shape(("turbo4", "ring5"), 16, 8, 64, 0, 1), 300, 7),
    (Shape(("turbo2", "turbo4"), 24, 1, 32, 8, 1), 140, 50),
    (Shape(("ring3.5", "ring3"), 256, 2, 64, 8, 1), 140, 9),
    (Shape(("ring4+norm16", "turbo2"), 8, 1, 16, 16, 1), 100, 33),
    (Shape(("f16", "ring4"), 64, 1, 64, 8, 1), 135, 5),
    (Shape(("f16", "ring3"), 64, 1, 64, 0, 1), 135, 5),
    (Shape(("ring4", "f16"), 48, 3, 32, 0, 1), 135, 5),
    (Shape(("f16", "f16"), 64, 2, 64, 0, 1), 200, 70),
    (Shape(("polarquant", "polarquant"), 64, 2, 64, 8, 1), 140, 9),
    (Shape(("polarpair-m4n4", "polarquant"), 128, 1, 32, 16, 1), 135, 5),
    (Shape(("ring4", "ring4"), 16, 1, 128, 8, 1), 400, 20),
    (Shape(("linear8", "ring2.5"), 64, 2, 64, 8, 1), 205, 20),
    (Shape(("ring2.5", "linear8"), 80, 1, 32, 8, 1), 140, 9),
]


RINGS = ("ring4", "ring3.5")
# With and without quantized blocks, from the beginning of a block and from within one, of one row and of many.
SEVERAL = [*last_rows(70, 70), *last_rows(33, 100), *last_rows(16, 16), *last_rows(1, 17), *last_rows(1, 90)]
OF_GPU = [
    *(
        (HALVES._replace(dim=dim, group=group, block_size=size, kv_heads=heads), last_rows(rows, rows), None)
        for dim, group, rows, size, heads in [
            (8, 1, 40, 16, 2),
            (16, 1, 1, 16, 1),
            (16, 3, 50, 32, 1),
            (80, 8, 19, 16, 1),
        ]
    ),
    # On, within a block or at its end.
    *((Shape(RINGS, 16, 1, 64, 8, 1), last_rows(3, length), None) for length in (100, 128, 129)),
    # With blocks that a window hides from some rows or from all, or that have been dropped.
    *(
        (Shape(("ring4", "turbo3"), 16, 2, 16, 8, 1), 2 * last_rows(rows, 190), window)
        for window, rows in [(1, 45), (16, 170), (17, 20), (40, 170), (64, 20), (1000, 45)]
    ),
    *((Shape(RINGS, 32, 2), SEVERAL, window) for window in (None, 40)),
]


@backends(CUDA)
@pytest.mark.parametrize(("shape", "sequences", "window"), OF_GPU)
def test_prompts_attend_in_any_order_of_threads(
    ops: Any, shape: Shape, sequences: list[Sequence_], window: int | None
) -> None:
    check_orders(prompt_case(ops, shape, sequences, window), (0, 1) if window is None else [1])


@pytest.mark.slow
@backends(CUDA)
@pytest.mark.parametrize(("shape", "tokens", "rows"), CODED, ids=str)
def test_a_prompt_attends_to_blocks_of_every_codec(
    ops: Any, monkeypatch: pytest.MonkeyPatch, shape: Shape, tokens: int, rows: int
) -> None:
    """Each codec has a decoder of its own. With few rows of a warp, and in the engine's blocks of threads."""
    case = prompt_case(ops, shape, last_rows(rows, tokens))
    check_orders(case)
    monkeypatch.undo()
    check_orders(case, [2])


@pytest.mark.slow
@backends(CUDA)
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_heads_of_the_size_that_models_have_attend(ops: Any, monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    """Registers and shared memory bound the tiles of rows, which the size of heads decides."""
    shape = Shape(("f16", "f16"), dim, 2, 64, 0, 1)
    use_warps(monkeypatch, 1, 32)
    check_orders(prompt_case(ops, shape, last_rows(45, 150)), [0, 3])
    monkeypatch.undo()
    check_orders(prompt_case(ops, shape._replace(group=3), last_rows(70, 70)), [2])


RULES = [(1.5, False), (None, True), (50.0, True)]
CAPPED = Shape(block_size=N), prompt_rows(9, 50, 70), 200


@backend_cases(
    "ops shape sequences window rule warps",
    [
        *((backend, *CAPPED, rule, ()) for backend, rule in each([NUMPY, *SOME, *MATRICES], RULES)),
        *((CUDA, Shape(("f16", "f16"), 16), last_rows(45, 100), None, rule, (1, 32)) for rule in RULES[:2]),
        (CUDA, Shape(("ring4", "ring4"), 16), last_rows(45, 100), None, RULES[0], (2, 16)),
        (CUDA, Shape(("ring4", "ring4"), 16), last_rows(45, 100), 40, RULES[1], (2, 16)),
    ],
    slow=[(backend, *CAPPED, rule, ()) for backend in [NUMPY, *SOME, *MATRICES] for rule in RULES],
)
def test_scores_are_capped_and_sinks_take_part(
    ops: Any,
    monkeypatch: pytest.MonkeyPatch,
    shape: Shape,
    sequences: list[Sequence_],
    window: int | None,
    rule: tuple[float | None, bool],
    warps: Any,
) -> None:
    """The sink counts once, also where blocks are decoded in several parts. Sinks are below all scores, among them and
    above."""
    if ops.backend == "native":
        monkeypatch.setattr(DECODED, 4 * N)
    if warps:
        use_warps(monkeypatch, *warps)
    softcap, has_sinks = rule
    plain = prompt_case(ops, shape, sequences, window)
    plain = replace(plain, q=plain.q * 4) if warps else plain
    case = plain.with_rule(
        softcap=softcap, sink_scores=np.linspace(-20, 12, 6).astype(np.float32) if has_sinks else None
    )
    case.check(actual := case.attended())
    with pytest.raises(AssertionError):
        plain.check(actual)


@backends(NUMPY, *SOME, *MATRICES)
@pytest.mark.parametrize("window", [None, 50])
def test_rows_see_up_to_the_end_of_an_image(ops: Any, window: int | None) -> None:
    plain = prompt_case(ops, POLAR, prompt_rows(2, 100, 20), window)
    rows = replace(plain.views[0], rows=slice(0, 40), sees=plain.views[0].position + 70)
    case = replace(plain, views=[rows], q=plain.q[:40])
    case.check(actual := case.attended())
    with pytest.raises(AssertionError):
        replace(case, views=[replace(rows, sees=0)]).check(actual)


@backends(*BEST, *MATRICES, CUDA)
def test_scores_may_rise_steeply(ops: Any) -> None:
    """Sums are rescaled, by more than one number of a vector and than half precision can weigh, and weights vanish."""
    rows = 300 if ops.backend == "native" else 96
    case = prompt_case(ops, HALVES._replace(kv_heads=1), last_rows(rows, rows))
    case = replace(case, q=case.q * np.linspace(0, 12, rows, dtype=np.float32)[:, None, None])
    case.check(case.attended())


@backends(CUDA)
def test_queries_beyond_half_precision_are_its_largest_numbers(ops: Any) -> None:
    """Infinities of both signs would give NaN."""
    case = prompt_case(ops, Shape(("ring4", "ring4"), 16, 1, 16, 8, 1), last_rows(40, 70))
    case.q[..., :2] = 1e6, -1e6
    assert np.isfinite(case.attended()).all()


SHAPES = st.builds(
    lambda codec, dim, group, kv_heads: Shape((codec, codec), dim, group, N, 8 if codec != "f16" else 0, kv_heads),
    st.sampled_from(["f16", "ring4", "turbo3", "polarquant", "linear8"]),
    st.sampled_from([24, 64]),
    st.integers(1, 8),
    st.integers(1, 3),
)
ROWS = st.builds(prompt_rows, st.integers(0, 12), st.integers(1, 150), st.integers(0, 150))


@pytest.mark.slow
@pytest.mark.skipif(not BEST, reason="no kernel is compiled here")
@given(
    st.sampled_from([*BEST, *MATRICES]),
    SHAPES,
    ROWS,
    st.none() | st.integers(1, 300),
    st.sampled_from([None, signed_hadamard, dense]),
    st.integers(1, 3),
    st.integers(0, 9),
)
@settings(max_examples=60)
def test_prompts_attend_to_all_that_is_before_them(
    backend: Backend,
    shape: Shape,
    sequences: list[Sequence_],
    window: int | None,
    rotation: Any,
    threads: int,
    seed: int,
) -> None:
    """On any number of threads, and with blocks that are decoded in several parts."""
    shape = shape if shape.types[0] in ("f16", "polarquant") else shape._replace(dim=64)
    case = prompt_case(backend.open(threads), shape, sequences, window, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DECODED, 5 * N)
        case = with_transform(case, rotation and rotation(shape.dim), is_scaled=rotation is dense)
        case.check(case.attended())


@pytest.mark.parametrize("backend", [*BEST, *MATRICES], ids=str)
def test_results_are_the_same_for_any_number_of_threads_and_any_parts(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = prompt_case(backend.open(), Shape(("ring4", "ring4"), block_size=64), prompt_rows(9, 200, 30), 90)
    wanted, (view,) = case.attended(), case.views
    for threads in (2, 3, 8):
        np.testing.assert_array_equal(replace(case, ops=backend.open(threads)).attended(), wanted)
    parts = []
    for rows in (slice(0, 77), slice(77, 78), slice(78, 200)):
        own = replace(view, rows=slice(0, rows.stop - rows.start), position=view.position + rows.start)
        parts.append(replace(case, views=[own], q=case.q[rows]).attended())
    np.testing.assert_array_equal(np.concatenate(parts), wanted)
    monkeypatch.setattr(DECODED, 4 * N)
    np.testing.assert_array_equal(case.attended(), wanted)
    monkeypatch.setattr(POOL, 8 * 2 * 64 * 128)
    np.testing.assert_array_equal(case.attended(), wanted)


@pytest.mark.skipif(not BEST, reason="no kernel is compiled here")
def test_levels_that_multiply_words_attend_alike() -> None:
    shape, rotation, sequences, window = PROMPTS[0]
    cases = [
        with_transform(prompt_case(backend.open(), shape, sequences, window), rotation(shape.dim), is_scaled=True)
        for backend in SOME
        if backend.level is not None and backend.level.multiplies_words
    ]
    results = [case.attended() for case in cases]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@backends(*BEST, *MATRICES)
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_queries_that_are_not_finite_give_results_that_are_not(ops: Any, broken: float) -> None:
    """Damaged weights are found by their results."""
    case = prompt_case(ops, Shape(group=1, kv_heads=1), last_rows(4, 4))
    case.q[2, 0, 5] = broken
    actual = case.attended()
    assert np.isnan(actual[2]).all()
    assert np.isfinite(actual[[0, 1, 3]]).all()


@backends(*BEST)
@pytest.mark.parametrize(("codec", "dim"), [("polarpair-m4n4+minmax", 64), ("f16", 1024), ("f16", 20)])
def test_layers_without_kernels_attend_in_numpy(ops: Any, codec: str, dim: int) -> None:
    shape = Shape((codec, "f16"), dim, 2, N, 8 if codec != "f16" else 0, 1)
    case = prompt_case(ops, shape, prompt_rows(2, 40, 0))
    np.testing.assert_array_equal(case.attended(), replace(case, ops=NUMPY.open()).attended())


@backends(*BEST)
def test_too_many_queries_for_a_head_are_refused(ops: Any) -> None:
    case = prompt_case(ops, Shape(dim=8, group=193, kv_heads=1), last_rows(1, 1))
    with pytest.raises(KernelError, match="193 query heads"):
        case.attended()
