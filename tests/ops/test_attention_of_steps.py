"""Attention of a step's rows on every backend, against float64; `tests.ops.attending` has what each may be off by.

Most tests have blocks of `f16`, which hold keys and values exactly: only a backend's arithmetic differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.engine.backends.cuda import launch_configs
from polarlm.engine.backends.kv import HeadTransform
from polarlm.engine.backends.numpy.kv.cache import LayerCache
from polarlm.engine.codecs.parts.rotation import dense, signed_hadamard, twice_signed_hadamard
from tests.ops.attending import Case, Sequence_, Shape, case_of
from tests.ops.backends import BEST, CUDA, NUMPY, SOME, backend_cases, backends
from tests.ops.products import product
from tests.pairs import each, in_turn, mostly_slow

TYPES = [
    ("ring4", "ring3.5"),
    ("ring5", "turbo3"),
    ("linear8", "ring4"),
    ("turbo4", "f16"),
    ("f16", "linear8"),
    ("polarpair-m4n4", "ring4"),
    ("ring3", "turbo2"),
    ("ring2.5", "linear8"),
    ("linear8", "ring2.5"),
    ("polarquant", "polarquant"),
]
RAGGED = [Sequence_(0), Sequence_(3), Sequence_(16), Sequence_(47), Sequence_(700), Sequence_(2000), Sequence_(31)]
SMALL = Shape(("ring4", "ring3"), 16, 3, 16, kv_heads=1)
HALVES = SMALL._replace(types=("f16", "f16"))
SEVERAL = [Sequence_(5, 4), Sequence_(64, 1), Sequence_(78, 16), Sequence_(15, 2), Sequence_(640, 9)]


def totals(lengths: Sequence[int], rows: Sequence[int] | None = None) -> list[Sequence_]:
    """Sequences of these lengths after the step, with one new row each, or several."""
    return [Sequence_(length - count, count) for length, count in zip(lengths, rows or [1] * len(lengths), strict=True)]


@pytest.fixture(autouse=True)
def _few_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    use_warps(monkeypatch, 2)


def use_warps(monkeypatch: pytest.MonkeyPatch, warps: int) -> None:
    """Of a GPU's blocks of threads: the engine has 8 or 12, of which the emulator takes long."""
    monkeypatch.setattr(launch_configs, "decode_attention", partial(launch_configs.decode_attention_by, warps))


def same_in_any_order(case: Case, processors: int, seeds: Sequence[int] = (0, 1, 2)) -> np.ndarray:
    """The result of a GPU with so many multiprocessors, each of which has a CTA: the same to the bit in any order of
    threads and CTAs."""
    device, results = case.ops._device, []
    device.processors = processors
    for device.seed in seeds:
        results.append(case.attended())
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
    return results[0]


def with_longer_queries(case: Case, by: float) -> Case:
    """With longer queries: some tokens weigh much more than others."""
    return Case(**{**vars(case), "q": case.q * np.float32(by)})


@backends(NUMPY, *SOME)
@pytest.mark.parametrize("sequences", [RAGGED, SEVERAL], ids=["one row", "several rows"])
@in_turn("window dim", [(None, 64), (20, 8), (600, 128)])
def test_rows_attend_to_their_sequence(ops: Any, window: int | None, dim: int, sequences: list[Sequence_]) -> None:
    case = case_of(ops, Shape(dim=dim), sequences, window)
    case.check(case.attended())


def with_kept(kept: int, n: int, rows: int) -> list[Sequence_]:
    """Sequences whose `kept` newest complete blocks are in full precision: with codes and without; every second one has
    several rows, which may reach into a further block."""
    lengths = [n - 1, 2 * n, (kept + 1) * n, (kept + 2) * n - 1, (kept + 3) * n + 5, (kept + 20) * n + n // 2]
    return [Sequence_(length, 1 + (rows - 1) * (number % 2), kept=kept) for number, length in enumerate(lengths)]


@backend_cases(
    "ops shape kept rows window",
    [
        (backend, shape, kept, rows, window)
        for backend, shape in [
            *((one, Shape(block_size=64)) for one in (NUMPY, *SOME)),
            *((one, Shape(("ring4", "ring3.5"), block_size=64)) for one in BEST),
            *((CUDA, shape) for shape in (SMALL, HALVES)),
        ]
        for kept, rows, window in [(1, 1, None), (4, 1, 200), (8, 9, None), (4, 5, 90), (16, 3, 70)]
    ],
)
def test_rows_attend_to_a_window_in_full_precision(
    ops: Any, shape: Shape, kept: int, rows: int, window: int | None
) -> None:
    """The sliding windows end inside its blocks, or among the codes. CTAs share it."""
    case = case_of(ops, shape, with_kept(kept, shape.block_size, rows), window)
    case.check(same_in_any_order(case, 11) if ops.backend == "cuda" else case.attended())


# Keys, values, head dim, query heads of a KV head, block size, bits of means.
CACHES = [
    Shape(("f16", "f16"), 64, 4, 64, 0),
    Shape(("f16", "f16"), 80, 7, 32, 0),
    Shape(("f16", "f16"), 8, 1, 16, 8),
    Shape(("f16", "f16"), 256, 2, 64, 0),
    Shape(("f16", "turbo4"), 128, 4, 64, 16),
    Shape(("ring3", "f16"), 256, 1, 64, 8),
    Shape(("ring3.5", "ring3"), 128, 4, 64, 8),
    Shape(("ring3.5", "ring3.5"), 16, 7, 32, 16),
    Shape(("ring4", "ring3.5"), 128, 8, 64, 8),
    Shape(("ring4", "ring4"), 80, 4, 128, 8),
    Shape(("ring4+norm16", "ring4+dense+norm16"), 96, 12, 64, 0),
    Shape(("ring5", "turbo4"), 256, 4, 128, 16),
    Shape(("turbo3", "ring5"), 8, 2, 32, 8),
    Shape(("turbo4", "turbo2"), 256, 8, 32, 0),
    Shape(("ring3", "turbo3"), 64, 11, 16, 8),
    Shape(("polarquant", "polarquant"), 64, 4, 64, 8),
    Shape(("ring4", "polarquant"), 80, 1, 64, 8),
    Shape(("polarpair-m4n4", "ring3"), 64, 4, 64, 8),
    Shape(("polarpair-m4n2+minmax-radius+g16", "polarquant"), 96, 1, 32, 0),
    Shape(("linear8", "ring2.5"), 16, 3, 32, 8),
    Shape(("ring2.5", "linear8"), 80, 4, 64, 8),
    Shape(("ring2.5", "ring2.5"), 256, 2, 64, 8),
    Shape(("linear8", "linear8"), 256, 4, 64, 8),
]


@backends(CUDA)
@mostly_slow("shape", CACHES, [CACHES[2], CACHES[7], CACHES[14], CACHES[18]])
def test_a_gpu_attends_to_every_codec(ops: Any, shape: Shape) -> None:
    """Sequences that end within the first block and across its end, at later block ends, and at the start of a block,
    with one new row and with several. Each codec has a decoder of its own."""
    n = shape.block_size
    lengths = [5 * n + 3, 4, n - 1, n + 2, 2 * n + 5, 3 * n]
    for rows in (None, [5, 4, 1, 9, 5, 3]):
        case = case_of(ops, shape, totals(lengths, rows))
        case.check(same_in_any_order(case, 7))


LATENTS = [("f16", 64), ("ring3", 64)]
MORE_LATENTS = [("ring4", 40), ("polarquant", 64), ("ring3.5", 64), ("linear8", 64)]


@backend_cases("ops types", [*each(SOME or [NUMPY], TYPES), *((NUMPY, types) for types in TYPES[:4])])
def test_rows_attend_to_codes(ops: Any, types: tuple[str, str]) -> None:
    """The tests of `tests/backends/native/codecs/` read the codes of every codec at every level."""
    case = case_of(ops, Shape(types, block_size=64), [Sequence_(1000, 3), Sequence_(10), Sequence_(320)], 900)
    case.check(case.attended())


@backend_cases(
    "ops name dim",
    [(ops, *of) for ops in (NUMPY, *BEST, CUDA) for of in LATENTS],
    slow=[(ops, *of) for ops in (*SOME, CUDA) for of in (*LATENTS, *MORE_LATENTS)],
)
def test_rows_attend_to_keys_that_are_values(ops: Any, name: str, dim: int) -> None:
    """Codes are stored once, in the order for keys. Of 18 heads a pass of compiled kernels has 9."""
    for group, mean_bits, sequences in ((18, 8, [Sequence_(1000, 1), Sequence_(10)]), (5, 0, [Sequence_(320, 3)])):
        shape = Shape((name, None), dim, group, 64, mean_bits, kv_heads=1)
        for is_prompt in (False, True):
            case = case_of(ops, shape, sequences, is_prompt=is_prompt)
            case.check(case.attended())


@backend_cases("ops name", each([NUMPY, *BEST, CUDA], ["f16", "ring3"]))
def test_rows_attend_to_a_window_of_keys_that_are_values(ops: Any, name: str) -> None:
    for kept, rows, is_prompt in ((4, 1, False), (8, 3, False), (4, 20, True)):
        sequences = with_kept(kept, 16, rows)[: 2 if is_prompt else None]
        case = case_of(ops, Shape((name, None), 64, 5, 16, kv_heads=1), sequences, is_prompt=is_prompt)
        case.check(case.attended())


@backends(CUDA)
@pytest.mark.parametrize(
    ("shape", "rows", "processors", "warps"),
    [
        (SMALL, None, 1, 1),
        (SMALL, None, 90, 2),
        (SMALL, [16, 1, 2, 3], 13, 3),
        (HALVES, None, 13, 3),
        (HALVES, [16, 1, 2, 3], 1, 3),
    ],
)
def test_any_number_of_ctas_and_warps_gives_attention(
    ops: Any, monkeypatch: pytest.MonkeyPatch, shape: Shape, rows: list[int] | None, processors: int, warps: int
) -> None:
    """One warp for all has three groups of means; 39 warps are more than the units of the short sequences. Whichever
    CTA is the last of a cell, it adds sums in the order of tokens."""
    use_warps(monkeypatch, warps)
    case = case_of(ops, shape, totals([16 * 43 - 5, 16 * 18, 40, 3], rows))
    case.check(same_in_any_order(case, processors, (0, 2)))


@backends(CUDA)
@pytest.mark.parametrize(("codec", "dim", "block"), [("linear8", 80, 64), ("linear8", 128, 128), ("ring4", 128, 64)])
def test_wide_codes_of_twelve_warps_are_loaded_late(
    ops: Any, monkeypatch: pytest.MonkeyPatch, codec: str, dim: int, block: int
) -> None:
    """By groups of tiles, or one side at a time; a warp has several blocks, some of them of two parts."""
    monkeypatch.undo()
    case = case_of(ops, Shape((codec, codec), dim, 4, block, kv_heads=1), totals([block * 19 + 3, 4, 2 * block + 5]))
    assert launch_configs.decode_attention(*case.cache.layouts, 4).threads == 12 * 32
    case.check(same_in_any_order(case, 1, [0]))


@backends(CUDA)
@pytest.mark.parametrize(
    ("types", "block", "window"),
    [
        (("ring4", "ring3.5"), 32, 1),
        (("ring4", "ring3.5"), 32, 71),
        (("f16", "f16"), 32, 17),
        (("f16", "f16"), 32, 33),
        (("turbo3", "f16"), 128, 375),
        (("ring4", "ring4"), 16, 640),
    ],
)
def test_a_window_hides_older_tokens(ops: Any, types: tuple[str, str], block: int, window: int) -> None:
    """Sink, current block and quantized blocks are cut or hidden; others have been dropped. Rows of a sequence have
    windows of their own, which may begin in different blocks. A CTA has two rows, or eight."""
    longest = block * 7 + 5
    lengths = [longest, longest + 11, block + 3, block * 2, 5]
    for rows in (None, [16, 7, 4, 1, 5]):
        for group in (4, 1):
            case = case_of(ops, Shape(types, 16, group, block, kv_heads=1), totals(lengths, rows), window)
            case.check(same_in_any_order(case, 5, [0]))


@backends(CUDA)
def test_a_sequence_without_rows_gives_zeros(ops: Any) -> None:
    """It pads a batch."""
    case = case_of(ops, SMALL, totals([70]))
    table = ops.spans(case.views, 16).pad_rows(2)
    q = ops.to_device(np.repeat(case.q, 2, axis=0))
    out = ops.to_host(ops.attention(q, case.cache, table, case.rule))
    case.check(out[:1])
    assert (out[1] == 0).all()


def sinks(heads: int) -> np.ndarray:
    """Scores below, among and above the scores of tokens, one for each head."""
    return np.linspace(-20, 12, heads).astype(np.float32)


SINKS = Shape(("ring4", "ring4"), 16, 3, 16)
LONG = [Sequence_(2000), Sequence_(78, 16), Sequence_(3)]


@backend_cases(
    "ops shape sequences window softcap has_sinks",
    [
        *((backend, Shape(), LONG, 600, *of) for backend in (NUMPY, *SOME) for of in [(1.5, 0), (None, 1), (50.0, 1)]),
        (CUDA, SINKS, totals([315, 40, 3]), None, 2.0, 0),
        (CUDA, SINKS, totals([315, 40, 3]), 50, None, 1),
        (CUDA, SINKS._replace(types=("f16", "f16")), totals([315, 40, 3], [3, 1, 2]), None, 2.0, 1),
        (CUDA, SINKS._replace(types=("f16", "f16")), totals([315, 40, 3], [3, 1, 2]), None, None, 1),
    ],
)
def test_scores_are_capped_and_sinks_take_part(
    ops: Any, shape: Shape, sequences: list[Sequence_], window: int | None, softcap: float | None, has_sinks: int
) -> None:
    """Where one CTA has a cell, and where several do."""
    plain = with_longer_queries(case_of(ops, shape, sequences, window), 1 if ops.backend != "cuda" else 4)
    case = plain.with_rule(softcap=softcap, sink_scores=sinks(6) if has_sinks else None)
    for processors in (1, 13) if ops.backend == "cuda" else ():
        case.check(same_in_any_order(case, processors, [0]))
    case.check(actual := case.attended())
    with pytest.raises(AssertionError):
        plain.check(actual)


@in_turn("types", TYPES)
@backends(*BEST)
def test_caps_and_sinks_over_codes(ops: Any, types: tuple[str, str]) -> None:
    plain = case_of(ops, Shape(types, block_size=64), [Sequence_(1000, 3), Sequence_(320)], 900)
    rule = {"softcap": 1.5, "sink_scores": sinks(6)}
    case = plain.with_rule(**rule)
    case.check(case.attended())
    wanted = case.exact()
    for name in rule:
        without = case.with_rule(**{name: None}).exact()
        assert np.abs(wanted - without).max() > 0.2 * np.abs(wanted).max(), f"{name} does little"


@backends(CUDA)
@pytest.mark.parametrize("sink", [np.nan, -np.inf])
def test_a_sink_that_is_not_finite(ops: Any, sink: float) -> None:
    """NaN makes the result NaN; minus infinity has no weight."""
    case = case_of(ops, SMALL._replace(group=1), totals([70]))
    out = case.with_rule(sink_scores=np.array([sink], np.float32)).attended()
    if np.isnan(sink):
        assert np.isnan(out).all()
    else:
        case.check(out)


ROTATIONS = [dense, None, signed_hadamard, twice_signed_hadamard]


@backend_cases(
    "ops rotation shape",
    [
        *((backend, rotation, Shape()) for backend, rotation in each(SOME or [NUMPY], ROTATIONS)),
        *((backend, dense, Shape(dim=80)) for backend in (NUMPY, *BEST)),
        *((CUDA, rotation, SINKS._replace(types=("f16", "f16"))) for rotation in ROTATIONS),
    ],
)
def test_the_result_is_scaled_and_rotated_back(ops: Any, rotation: Any, shape: Shape) -> None:
    case = case_of(ops, shape, [Sequence_(100, 2), Sequence_(5)])
    scale = np.repeat(np.random.default_rng(0).uniform(0.5, 2, 2), 3).astype(np.float32)
    transform = HeadTransform(2, None, None, rotation and rotation(shape.dim), scale)
    case = Case(**{**vars(case), "transform": transform})
    case.check(case.attended())


@backends(CUDA)
@pytest.mark.parametrize(
    ("rows", "rotation", "formats", "dtype"),
    [
        (1, signed_hadamard, ["f16"], np.float32),
        (2, signed_hadamard, ["f16"], np.float16),
        (5, None, ["bf16", "bf16"], np.uint16),
        (5, dense, ["f16"], np.float32),
    ],
)
def test_attention_of_3_rows_comes_in_the_type_of_the_next_product(
    ops: Any, rows: int, rotation: Any, formats: list[str], dtype: type[np.generic]
) -> None:
    """With two sequences in a step: the product has the same bits as with float32, and takes a kernel less."""
    case = case_of(ops, Shape(("f16", "f16"), 16, 2, 16, 0), [Sequence_(20, rows), Sequence_(5, rows)])
    case = Case(**{**vars(case), "transform": HeadTransform(2, None, None, rotation and rotation(16))})
    consumer = product(ops, [(name, 24) for name in formats], 64, 1).w
    results, launches, kernels = [case.on_device(), case.on_device(consumer)], getattr(ops._device, "launches", []), []
    assert [x.dtype for x in results] == [np.float32, dtype]
    products = []
    for x in results:
        before = len(launches)
        products.append(ops.to_host(ops.linear(x.reshape(2 * rows, -1), consumer)))
        kernels.append(launches[before:].count("narrow_kernel"))
    np.testing.assert_array_equal(*products)
    if dtype != np.float32 and launches:  # a GPU does not say
        assert (kernels[0] > 0, kernels[1]) == (True, 0)


FAR = [(20, None), (1e3, None), (1e3, 3.0)]


@backend_cases(
    "ops shape sequences large softcap",
    [
        *((backend, Shape(), [Sequence_(1300)], *of) for backend in (NUMPY, *BEST) for of in FAR),
        (CUDA, SMALL._replace(types=("ring4", "ring4"), group=2), totals([200]), 300, None),
    ],
)
def test_scores_that_are_far_apart(
    ops: Any, shape: Shape, sequences: list[Sequence_], large: float, softcap: float | None
) -> None:
    """Weights of 0, and tops that grow from chunk to chunk; scores far beyond the cap."""
    case = with_longer_queries(case_of(ops, shape, sequences), large).with_rule(softcap=softcap)
    case.check(case.attended())


@backends(CUDA)
def test_queries_beyond_half_precision_are_its_largest_numbers(ops: Any) -> None:
    """Infinities of both signs would give NaN."""
    case = case_of(ops, SMALL._replace(group=1), totals([70]))
    case.q[..., :2] = 1e6, -1e6
    assert np.isfinite(case.attended()).all()


@backends(*BEST)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_recording_follows_the_tables(ops: Any, threads: int) -> None:
    """More chunks and fewer, of codes and of halves, blocks in other places, longer and shorter current blocks."""
    ops = BEST[0].open(threads)
    sequences = [Sequence_(535), Sequence_(350), Sequence_(515, kept=12), Sequence_(421, kept=4)]
    case = case_of(ops, Shape(("ring4", "ring3.5")), sequences)
    calls = []

    def work(q: np.ndarray, table: Any) -> np.ndarray:
        calls.append(table)
        return ops.attention(q, case.cache, table, case.rule)

    for number in range(4):
        own = case.alone(number)
        actual = ops.run_graph("step", work, [own.q, ops.spans(own.views, 16)])
        np.testing.assert_array_equal(actual, own.attended())
    assert len(calls) == 1


@backends(*BEST)
def test_a_sequence_finds_the_same_alone(ops: Any) -> None:
    case = case_of(ops, Shape(), RAGGED)
    together = case.attended()
    for number in range(len(RAGGED)):
        np.testing.assert_array_equal(case.alone(number).attended(), together[number : number + 1])


@backend_cases("ops name", each(BEST or [NUMPY], ["ring3", "f16"]))
def test_a_head_finds_the_same_beside_others_that_find_more(ops: Any, name: str) -> None:
    """Heads that share a latent vector are computed together, but what one has seen changes nothing of another."""
    case = case_of(ops, Shape((name, None), 64, 10, 64, kv_heads=1), [Sequence_(1000, 2)])
    other = Case(**{**vars(case), "q": case.q.copy()})
    other.q[:, 1::2] *= 40
    np.testing.assert_array_equal(other.attended()[:, ::2], case.attended()[:, ::2])


SHAPES = st.builds(
    Shape,
    st.sampled_from(TYPES),
    dim=st.sampled_from([32, 64, 80, 96, 128, 256]),
    group=st.integers(1, 8),
    block_size=st.sampled_from([16, 32, 48, 64, 128]),
    mean_bits=st.sampled_from([0, 8, 16]),
    kv_heads=st.just(2),
)
SEQUENCES = st.builds(Sequence_, st.integers(0, 1500), st.integers(1, 16), st.just(0), st.integers(0, 9))


@pytest.mark.slow
@pytest.mark.skipif(not BEST, reason="no kernel is compiled here")
@settings(max_examples=15, deadline=None)
@given(SHAPES, st.lists(SEQUENCES, min_size=1, max_size=4), st.none() | st.integers(1, 800), st.integers(0, 99))
def test_attention_over_codes_of_any_shape(
    shape: Shape, sequences: list[Sequence_], window: int | None, seed: int
) -> None:
    """Sequences of several lengths and numbers of rows; all read codes, unless a window hides them."""
    sequences = [one._replace(length=one.length + (3 + one.kept) * shape.block_size) for one in sequences]
    case = case_of(BEST[0].open(), shape, sequences, window, seed=seed)
    case.check(case.attended())


@backends(*BEST)
def test_a_layer_without_tiles_attends_in_numpy(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from polarlm.engine.backends.native.launch import CannotRecord

    monkeypatch.setattr("polarlm.engine.backends.native.codecs._module", lambda name: None)
    case = case_of(ops, Shape(("ring4", "ring3.5")), [Sequence_(100), Sequence_(40, 3)])
    assert type(case.cache) is LayerCache
    np.testing.assert_allclose(case.attended(), case.exact(), atol=1e-5 * np.abs(case.exact()).max())
    with pytest.raises(CannotRecord), ops._launch.record():
        case.attended()


@backends(*SOME)
def test_nan_in_a_slot_gives_nan(ops: Any) -> None:
    """Damaged weights are found by their results. The second sequence has a slot of its own."""
    for side in ("full_k", "full_v"):
        case = case_of(ops, Shape(), [Sequence_(5), Sequence_(40)])
        getattr(case.cache, side)[case.views[0].current.block, :, 2, 7] = np.nan
        actual = case.attended()
        assert (np.isnan(actual[0]).any(-1)).all(), side
        np.testing.assert_array_equal(actual[1:], case.alone(1).attended(), side)
