"""Every way in which the engine compiles its kernels, and a set of them that is small enough for every test run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from polarlm.engine import codecs, records, weight_formats
from polarlm.engine.backends.cuda import launch_configs, packed, wide
from polarlm.engine.backends.cuda.device.kernel_source import OVERLAPS, can_read, source
from polarlm.engine.backends.cuda.heads import rotate_config
from polarlm.engine.backends.cuda.launch import LaunchConfig
from polarlm.engine.backends.cuda.launch_configs import SYSTEM_BYTES
from polarlm.engine.backends.cuda.recurrent import ChannelSizes, DeltaSizes, Mamba2Sizes, state_codes
from polarlm.engine.backends.cuda.sampling import SAMPLE
from polarlm.engine.backends.ops import STEP_ROWS
from polarlm.engine.records import Layout
from polarlm.engine.records.fragments import Geometry
from tests.cuda.formats import FORMAT_PAIRS
from tests.cuda.nvrtc import SHARED_LIMIT

Define = int | float | str


@dataclass(frozen=True)
class Cache:
    """The records of a layer: names of codecs, and the shape of a block. mean_bits: 0 without centring, 8 or 16.
    values: empty if keys are values, as latent vectors are."""

    keys: str
    values: str
    head_dim: int
    block_size: int = 64
    mean_bits: int = 8

    def layouts(self) -> tuple[Layout, Layout]:
        if not self.values:
            shape = self.block_size, self.head_dim, self.mean_bits
            return (records.layout(codecs.get(self.keys), False, *shape, is_latent=True),) * 2
        keys, values = codecs.get(self.keys), codecs.get(self.values)
        mean_bits = self.mean_bits if codecs.is_quantized(keys) else 0
        return (
            records.layout(keys, False, self.block_size, self.head_dim, mean_bits),
            records.layout(values, True, self.block_size, self.head_dim),
        )

    def __str__(self) -> str:
        return f"{self.keys}/{self.values} D{self.head_dim} N{self.block_size} mean{self.mean_bits}"


@dataclass(frozen=True)
class Variant:
    """One text: `cuda/<kernel>.cu` with records and constants; dynamic_shared: most bytes of any launch. memory: bytes
    of shared memory of the multiprocessors that it is made for, or 0 for all."""

    kernel: str
    defines: Mapping[str, Define]
    cache: Cache | None = None
    dynamic_shared: int = 0
    memory: int = 0

    def archs(self) -> list[int]:
        """The architectures that it is compiled for: of latent vectors, those with enough shared memory."""
        is_latent = self.cache is not None and not self.cache.values
        return [
            arch
            for arch, limit in SHARED_LIMIT.items()
            if self.memory in (0, limit + SYSTEM_BYTES) and not (is_latent and self.dynamic_shared > limit)
        ]

    def text(self) -> str:
        if self.cache is None:
            return source(self.kernel, **self.defines)
        return source(self.kernel, *self.cache.layouts(), **self.defines)

    def overlapping(self) -> Variant:
        """The same for a launch that begins before the one before it has ended."""
        return replace(self, defines={**self.defines, OVERLAPS: 1})

    def __str__(self) -> str:
        values = " ".join(f"{name}={value}" for name, value in self.defines.items())
        return " ".join(part for part in (self.kernel, str(self.cache or ""), values) if part)


_SHORT = ("__half", "__nv_bfloat16")
_RESULTS = ({}, *({"TO": to} for to in _SHORT))  # constants for a result in float32, and in each type it is rounded to
_HEAD_DIMS = (64, 80, 96, 128, 256)
# Every cache type that the kernels read.
_CACHE_TYPES = [name for name in codecs.available() if records.record_of(codecs.get(name), Geometry(False, 64, 128))]
_MOST_SEQUENCES = 256  # most sequences of a step, for shared memory


def _all(kernel: str, **choices: tuple[Define, ...]) -> list[Variant]:
    """Every combination of the values of each constant."""
    return [Variant(kernel, dict(zip(choices, values, strict=True))) for values in itertools.product(*choices.values())]


def _heads(kernel: str) -> list[Variant]:
    """Variants of what joins `heads.cuh`: each head dim with and without norms, rotated or not."""
    variants = []
    for d, (normed, keys, values) in itertools.product(_HEAD_DIMS, ((0, 1, 1), (1, 1, 0), (0, 0, 1))):
        orders = {"KEY_ORDER": d & -d if keys else 1, "VALUE_ORDER": d & -d if values else 1}
        constants = {"HEAD_DIM": d, "HEAD_NORMS": normed, **orders}
        if kernel == "place_kv":
            for rows in (1, STEP_ROWS):
                variants.append(Variant(kernel, {**constants, "STEP_ROWS": rows}, Cache("f16", "f16", d, mean_bits=0)))
        else:
            variants.append(Variant(kernel, constants))
    return variants


def _exact(kernel: str) -> list[Variant]:
    """What moves full-precision records, for every head dim."""
    return [Variant(kernel, {}, Cache("f16", "f16", d, mean_bits=0)) for d in _HEAD_DIMS]


def _others(caches: list[Cache]) -> list[Cache]:
    """A cache for each cache type that none of these has; values are in half precision where it stores keys alone."""
    named = {name for cache in caches for name in (cache.keys, cache.values)}
    missing = [name for name in _CACHE_TYPES if name not in named]
    return [Cache(name, name if "v" in codecs.get(name).serves else codecs.FULL, 128) for name in missing]


# Caches of models whose attention has soft caps or sink scores. With wide heads the fewest registers are left.
_OTHER_SCORES = {"f16/f16 D64 N64 mean0", "ring4/ring3.5 D64 N64 mean8", "ring4/ring3.5 D256 N64 mean8"}
_OTHER_SCORES |= {"f16/f16 D256 N64 mean0", "ring4/ring4 D128 N64 mean8", "polarquant/polarquant D128 N64 mean8"}


def _score_variants(variants: list[Variant]) -> list[Variant]:
    """Variants of attention with a soft cap, with sink scores, and with both."""
    some = [variant for variant in variants if str(variant.cache) in _OTHER_SCORES]
    rules: tuple[dict[str, Define], ...] = ({"SOFTCAP": 50.0}, {"SINK_SCORES": 1}, {"SOFTCAP": 50.0, "SINK_SCORES": 1})
    return [replace(variant, defines={**variant.defines, **rule}) for rule in rules for variant in some]


def _decode_attention() -> list[Variant]:
    """Steps of one row and of several, for groups of several sizes, with and without a rotation."""
    types = (("f16", "f16"), ("ring4", "ring3.5"), ("ring3.5", "ring3"), ("ring4", "ring4"), ("ring5", "ring5"))
    types += (("ring5", "turbo3"), ("turbo4", "f16"), ("f16", "ring4"), ("ring3", "turbo2"), ("turbo4", "turbo4"))
    caches = [Cache(*pair, d) for pair in types for d in _HEAD_DIMS]
    caches += [Cache("f16", "f16", d, mean_bits=0) for d in _HEAD_DIMS]
    caches += [Cache("ring4+norm16", "ring4+norm16", d, mean_bits=16) for d in _HEAD_DIMS]
    caches += [Cache("ring4", "ring4", 128, block_size=n) for n in (16, 32, 128)]
    caches += [Cache("polarquant", "polarquant", d) for d in (64, 80, 128, 256)]
    caches += [Cache("polarquant", "ring5", 128), Cache("ring4", "polarquant", 128), Cache("ring5", "polarquant", 128)]
    caches += [Cache("polarpair-m4n4", "polarquant", 128), Cache("polarpair-m4n2", "ring4", 256, mean_bits=16)]
    caches += _others(caches)
    caches += [Cache("linear8", "ring2.5", d) for d in _HEAD_DIMS]
    caches += [Cache("ring2.5", "linear8", d) for d in _HEAD_DIMS]
    variants, results = list[Variant](), itertools.cycle(_RESULTS)
    for cache, group in zip(caches, itertools.cycle((4, 8, 1, 12)), strict=False):
        for rows in (1, STEP_ROWS):
            order = 1 if len(variants) % 4 == 3 else cache.head_dim & -cache.head_dim
            config = launch_configs.decode_attention(*cache.layouts(), group, rows, _MOST_SEQUENCES, order)
            variants.append(Variant("decode_attention", {**config.defines, **next(results)}, cache, config.shared))
    return [*variants, *_score_variants(variants)]


def _prefill_attention() -> list[Variant]:
    types = (("f16", "f16"), ("ring4", "ring3.5"), ("ring5", "turbo3"), ("turbo4", "f16"), ("ring3", "turbo2"))
    caches = [Cache(*pair, d) for pair in types for d in _HEAD_DIMS]
    caches += [Cache("f16", "f16", d, mean_bits=0) for d in _HEAD_DIMS]
    caches += [Cache("ring4", "ring4", 128, block_size=n) for n in (16, 32, 128)]
    caches += [Cache("polarquant", "polarquant", d) for d in (64, 80, 128, 256)]
    caches += [Cache("polarpair-m4n4", "polarquant", 128), Cache("polarpair-m4n2", "ring4", 256, mean_bits=16)]
    caches += _others(caches)
    caches += [Cache("polarpair-m4n2", "ring4", 256)]  # with the fewest registers to spare
    groups = [*itertools.islice(itertools.cycle((1, 4, 8, 3)), len(caches) - 1), 3]
    more = [Cache("linear8", "ring2.5", 128), Cache("ring2.5", "linear8", 256)]
    caches, groups = [*caches, *more], [*groups, *itertools.islice(itertools.cycle((4, 1, 8)), len(more))]
    variants = []
    for cache, group in zip(caches, groups, strict=True):
        config, _ = launch_configs.prefill_attention(*cache.layouts(), group)
        variants.append(Variant("prefill_attention", config.defines, cache, config.shared))
    return [*variants, *_score_variants(variants)]


def _encode_blocks() -> list[Variant]:
    types = ("ring3", "ring4", "turbo2", "ring5", "turbo4", "ring3.5", "turbo3", "polarquant", "f16")
    shapes = itertools.cycle([(64, 64, 8), (80, 32, 0), (128, 64, 16), (256, 64, 8), (96, 16, 8), (128, 128, 8)])
    caches = [Cache(keys, values, *next(shapes)) for keys in types for values in types]
    caches += [Cache("ring4+norm16", "ring4+norm16", 8, mean_bits=16), Cache("polarpair-m4n4", "polarquant", 128)]
    caches += [Cache("linear8", "ring2.5", 128)]
    caches += _others(caches)
    return [_encoder("encode_blocks", cache, launch_configs.encode_blocks(*cache.layouts())) for cache in caches]


def _encoder(kernel: str, cache: Cache, config: LaunchConfig | None) -> Variant:
    assert config is not None
    return Variant(kernel, config.defines, cache, config.shared)


def _encode_rows() -> list[Variant]:
    """Codes of one byte and of two, of pairs and of values; targets in registers at once and in several parts. Keys
    with tilted norms and with others, and values."""
    shapes = itertools.cycle([(64, 64, 8), (80, 32, 0), (128, 64, 16), (96, 16, 8), (256, 64, 8), (128, 128, 8)])
    types = ("ring4", "ring5", "ring3.5", "turbo2", "ring4+norm16", "ring2.5", "turbo4")
    variants = []
    for number, name in enumerate([*3 * types, "ring4"]):
        for values, is_tilted in ((False, True), (number % 3 != 2, False)):
            cache = Cache(*(("f16", name) if values else (name, "f16")), *next(shapes))
            config = launch_configs.encode_rows(cache.layouts()[values], is_tilted)
            variants.append(_encoder("encode_rows", cache, config))
    return variants


_READ = tuple(name for name in weight_formats.available() if can_read(name))  # by the kernels
_PACKED = tuple(name for name in _READ if weight_formats.get(name).unpack)

# What `linear` asks for: NORMED, ADD, and whether with an ACTIVATION.
_SILU: dict[str, Define] = {"ACTIVATION": "silu"}
_GELU: dict[str, Define] = {"ACTIVATION": "gelu_tanh"}
_CLAMPED: dict[str, Define] = {"ACTIVATION": "swiglu_clamped"}
_LINEAR = ((0, 0, {}), (1, 0, {}), (0, 1, {}), (1, 1, {}), (0, 0, _SILU), (1, 0, _SILU), (0, 0, _GELU), (1, 0, _GELU))


def _linear(kernel: str, **choices: tuple[Define, ...]) -> list[Variant]:
    return [
        replace(variant, defines={**variant.defines, "NORMED": normed, "ADD": add, **activation})
        for normed, add, activation in _LINEAR
        for variant in _all(kernel, **choices)
    ]


def _expert_variants(variants: list[Variant]) -> list[Variant]:
    """Products of one row with the matrices of experts: gate and up, after a norm, and down."""
    some = [v for v in variants if v.defines["ROWS"] == 1 and not v.defines["ADD"]]
    some = [v for v in some if v.defines["NORMED"] == ("ACTIVATION" in v.defines) and "TO" not in v.defines]
    clamped = [replace(v, defines={**v.defines, **_CLAMPED}) for v in some if v.defines.get("ACTIVATION") == "silu"]
    return [replace(v, defines={**v.defines, "EXPERTS": 1}) for v in (*some, *clamped)]


_MEMORIES = sorted({limit + SYSTEM_BYTES for limit in SHARED_LIMIT.values()})


def _gemm_wide() -> list[Variant]:
    """x comes normalised and in half precision."""
    variants = []
    for memory, rows, weight, warps in itertools.product(_MEMORIES, (8, 16, 32, 48, 64), _PACKED, ((8, 1), (2, 2))):
        config, _ = wide.gemm_wide(rows, (weight_formats.get(weight),), warps, memory)
        constants = {name: (value,) for name, value in config.defines.items()}
        variants += [
            replace(variant, dynamic_shared=config.shared, memory=memory)
            for variant in _linear("gemm_wide", WEIGHT=(weight,), **constants)
            if not variant.defines["NORMED"]
        ]
    return [*variants, *_rounded_results(variants), *_group_variants(), *_two_formats("gemm_wide", (8, 64))]


def _group_variants() -> list[Variant]:
    """Products of groups of rows with the matrices of experts: gate and up, and down."""
    variants = []
    kinds = itertools.product(_MEMORIES, (64, 1024, 4096), _READ, ("silu", "swiglu_clamped", None))
    for memory, pairs, weight, activation in kinds:
        config, _ = wide.gemm_wide_experts(wide.expert_groups(pairs, 64)[0], weight_formats.get(weight), memory)
        to = "__nv_bfloat16" if weight == "bf16" else "__half"
        rounded = {"ACTIVATION": activation, "TO": to} if activation else {}
        defines = {"WEIGHT": weight, "NORMED": 0, "ADD": 0, **rounded, **config.defines}
        variants.append(Variant("gemm_wide", defines, dynamic_shared=config.shared, memory=memory))
    return variants


def _rounded_results(variants: list[Variant]) -> list[Variant]:
    """The variants with an activation, for results in the type in which the next product takes them."""
    rounded = [v for v in variants if "ACTIVATION" in v.defines]
    return [
        replace(v, defines={**v.defines, "TO": to}) for v, to in zip(rounded, itertools.cycle(_SHORT), strict=False)
    ]


def _gemv_packed() -> list[Variant]:
    """With one tile and more, and the shared memory of the smallest and the largest GPU."""
    variants: list[Variant] = []
    for weight, rows, out in itertools.product(_PACKED, (1, 2), (256, 16384)):
        format = weight_formats.get(weight)
        for memory, gated in itertools.product((100 << 10, 228 << 10), (False, True)):
            config, *_ = packed.gemv_packed(rows, 128, memory, (packed.rows_of(format, out),), gated)
            constants = {name: (value,) for name, value in config.defines.items()}
            variants += [
                replace(variant, dynamic_shared=config.shared)
                for variant in _linear("gemv_packed", WEIGHT=(weight,), **constants)
                if ("ACTIVATION" in variant.defines) == gated
            ]
    return [*variants, *_expert_variants(variants), *_two_formats("gemv_packed", (1, 2))]


def _two_formats(kernel: str, numbers: Sequence[int]) -> list[Variant]:
    """Products of these numbers of rows with matrices of two formats, of the sizes of queries and values."""
    variants: list[Variant] = []
    for names, rows, sizes, memory in itertools.product(FORMAT_PAIRS, numbers, ((5120, 1024), (9216, 1024)), _MEMORIES):
        both, normed = tuple(map(weight_formats.get, names)), int(kernel == "gemv_packed")
        if normed:
            of_rows = tuple(map(packed.rows_of, both, sizes))
            config, *_ = packed.gemv_packed(rows, 128, memory, of_rows)
        else:
            config, _ = wide.gemm_wide(rows, both, wide.warps_for(sizes, 4, 128), memory)
        formats: dict[str, Define] = {"WEIGHT": names[0], "SECOND": names[1], "NORMED": normed}
        defines = {**formats, "ADD": 0, **config.defines}
        variants.append(Variant(kernel, defines, dynamic_shared=config.shared, memory=memory))
    return variants


def _gemv() -> list[Variant]:
    formats = tuple(name for name in _READ if name not in _PACKED)
    variants = _linear("gemv", WEIGHT=formats, ROWS=(1, 2), SPLIT=(1, 2, 4, 8))
    return [*variants, *_expert_variants(variants)]


# Key dim, value dim, tokens of a block, width: of models, and of others that threads share out otherwise.
_DELTA_SIZES = [DeltaSizes(128, 128, 64, 4), DeltaSizes(128, 128, 32, 4), DeltaSizes(64, 192, 64, 3)]


# The same of Mamba 2: of Granite 4 H and Nemotron 3 Nano, and of Nemotron-H 47B and 56B, first.
_MAMBA2_SIZES = [Mamba2Sizes(*of) for of in ((128, 64, 64, 4), (256, 64, 64, 4), (128, 64, 32, 4), (64, 80, 64, 3))]


def _delta() -> dict[str, list[Variant]]:
    """The kernels of delta rules and of Mamba 2."""
    variants: dict[str, list[Variant]] = {}
    for sizes in (*_DELTA_SIZES, *_MAMBA2_SIZES):
        sizes.check()
        is_mamba2 = isinstance(sizes, Mamba2Sizes)
        configs = [
            *(("delta_step", sizes.step(rows)) for rows in (1, STEP_ROWS)),
            ("advance_delta", sizes.advance()),
            ("mamba2_blocks" if is_mamba2 else "delta_blocks", sizes.blocks()),
            *(("delta_scan", sizes.scan(heads, 132, 228 << 10)) for heads in ((48, 128) if is_mamba2 else (16, 48))),
        ]
        if not is_mamba2:
            configs += [("delta_results", sizes.finish()), ("state_codes", state_codes(sizes.key_dim, sizes.value_dim))]
        for kernel, config in configs:
            variants.setdefault(kernel, []).append(Variant(kernel, config.defines, dynamic_shared=config.shared))
    for channels in (ChannelSizes(128, 128, 64, 4), ChannelSizes(64, 192, 64, 3)):
        channels.check()
        steps = [channels.step(rows, advances=advances) for rows, advances in ((1, False), (16, False), (16, True))]
        for kernel, config in [("advance_delta", channels.advance()), *(("channel_delta", step) for step in steps)]:
            variants.setdefault(kernel, []).append(Variant(kernel, config.defines, dynamic_shared=config.shared))
    return variants


# Latent vectors: of DeepSeek V2 and V3, Kimi K2 and GLM-4.7-Flash, in steps that warps share equally and otherwise.
_LATENT = [
    Cache(name, "", 576, mean_bits=bits) for name, bits in (("f16", 0), ("ring3", 8), ("ring4", 8), ("ring5", 16))
]
_LATENT += [Cache(name, "", 576) for name in ("linear8", "turbo4", "polarquant", "ring2.5")]
_LATENT += [Cache("ring4", "", 320, block_size=32), Cache("ring3", "", 288, mean_bits=0)]


def _latent() -> dict[str, list[Variant]]:
    """What attends to latent vectors, for 16 and 128 heads, and what moves and encodes them."""
    full = Cache("f16", "", 576, mean_bits=0)
    variants = {name: [Variant(name, {}, full)] for name in ("append_kv", "copy_full")}
    variants["transform_heads"] = [
        Variant("transform_heads", {**_HEADS_OF_ONE, "HEAD_DIM": 576, "KEY_ORDER": order}) for order in (1, 64)
    ]
    variants["rotate"] = [Variant("rotate", rotate_config(576, 64, 32).defines)]
    for cache, heads in zip(_LATENT, itertools.cycle((16, 128, 20)), strict=False):
        keys, values = cache.layouts()
        configs = {
            "latent_attention": launch_configs.latent_attention(keys, heads),
            "encode_blocks": launch_configs.encode_blocks(keys, values),
            "encode_rows": launch_configs.encode_rows(keys, True),
        }
        for kernel, config in configs.items():
            if config is not None:
                variants.setdefault(kernel, []).append(Variant(kernel, config.defines, cache, config.shared))
    return variants


_ONE_GROUP: dict[str, tuple[Define, ...]] = {"GROUPS": (1,), "TOP_GROUPS": (1,), "BEST": (1,)}
_HEADS_OF_ONE: dict[str, Define] = {"HEAD_NORMS": 0, "VALUE_ORDER": 1, "SIDES": 1}


# File name in cuda/ → every variant.
VARIANTS: dict[str, list[Variant]] = {
    "activate_mul": [
        *_all("activate_mul", ACTIVATION=("silu", "gelu_tanh", "swiglu_clamped")),
        *_all("activate_mul", ACTIVATION=("silu", "gelu_tanh", "swiglu_clamped"), TO=_SHORT),
    ],
    **_delta(),
    "add_experts": _all("add_experts", ADD=(0, 1)),
    "add_parts": [
        *_all("add_parts", ADD=(0, 1)),
        *_all("add_parts", ADD=(0,), ACTIVATION=("silu", "gelu_tanh", "swiglu_clamped"), TO=("float", *_SHORT)),
    ],
    "group_pairs": _all("group_pairs", COUNT=(8, 128, 4096), ROWS=wide.GROUP_ROWS),
    "append_kv": _exact("append_kv"),
    "transform_heads": _heads("transform_heads"),
    "copy_full": _exact("copy_full"),
    "copy_records": _all("copy_records"),
    "decode_attention": _decode_attention(),
    "dequantize": _all("dequantize", WEIGHT=_PACKED),
    "elementwise": [
        *_all("elementwise", ACTIVATION=("silu", "gelu_tanh", "swiglu_clamped", "relu_squared"), GROUPED=(0,)),
        *_all("elementwise", ACTIVATION=("gelu", "plain_gelu_tanh"), GROUPED=(0,)),
        *_all("elementwise", ACTIVATION=("gated", "scaled"), GROUPED=(0, 1)),
    ],
    "embed": _all("embed", WEIGHT=_READ),
    "encode_blocks": _encode_blocks(),
    "encode_rows": _encode_rows(),
    "gemm_wide": _gemm_wide(),
    "gemv": _gemv(),
    "gemv_packed": _gemv_packed(),
    "naive": _all("naive", D=(64, 128, 256), BLOCK_SIZE=(64, 16), GROUP=(4, 1)),
    "logprobs": _all("logprobs"),
    "narrow": _all("narrow", TO=_SHORT, NORMED=(0, 1)),
    "place_kv": _heads("place_kv"),
    "prefill_attention": _prefill_attention(),
    "repack": _all("repack", WEIGHT=_PACKED),
    "layer_norm": _all("layer_norm"),
    "centre": _all("centre"),
    "clip": _all("clip"),
    "text_attention": _all("text_attention", HEAD_DIM=(64, 72, 80), GROUP=(1,), WARPS=(4,)),
    "rms_norm": _all("rms_norm", ADD=(0, 1)),
    "rotate": [Variant("rotate", rotate_config(d, d & -d, 32).defines) for d in _HEAD_DIMS],
    "softcap": _all("softcap"),
    "mamba2_results": _all("mamba2_results"),
    "short_conv": _all("short_conv", WIDTH=(3, 4)),
    "route": [
        *_all("route", COUNT=(8, 64, 128, 256, 512), TOP_K=(8,), SIGMOID=(0, 1), RENORMALIZE=(0, 1), **_ONE_GROUP),
        *_all("route", COUNT=(2048,), TOP_K=(40,), SIGMOID=(0,), RENORMALIZE=(1,), **_ONE_GROUP),
        *_all(
            "route", COUNT=(160,), TOP_K=(6,), SIGMOID=(0,), RENORMALIZE=(0,), GROUPS=(8,), TOP_GROUPS=(3,), BEST=(1,)
        ),
        *_all(
            "route", COUNT=(256,), TOP_K=(8,), SIGMOID=(1,), RENORMALIZE=(1,), GROUPS=(8,), TOP_GROUPS=(4,), BEST=(2,)
        ),
    ],
    "sample": [Variant("sample", SAMPLE.defines)],
    "join_latents": _all("join_latents"),
    "take_latents": _all("take_latents"),
    "latent_sums": _all("latent_sums"),
}
for _name, _variants in _latent().items():
    VARIANTS[_name] = [*VARIANTS.get(_name, ()), *_variants]


def traits(variant: Variant) -> set[tuple[str, str]]:
    """What of a variant has to be compiled somewhere: its kernel with each of its codecs, with its head dim, for one
    row of a sequence or for several, with a soft cap or sink scores; and with the matrices of experts, or of a second
    format of 16 or 32 weights of a group."""
    cache, constants = variant.cache, ("STEP_ROWS", "SOFTCAP", "SINK_SCORES", "EXPERTS")
    of = {f"{name}={variant.defines[name]}" for name in constants if name in variant.defines}
    if "SECOND" in variant.defines:
        of.add(f"second {weight_formats.get(str(variant.defines['SECOND'])).group}")
    if cache is not None:
        of |= {cache.keys, cache.values, str(cache.head_dim)}
    return {(variant.kernel, trait) for trait in of}


def covering() -> Iterator[tuple[Variant, int]]:
    """Every kernel for every architecture, with every codec and head dim that it serves.

    The variants take turns, in steps that change every constant; then come those with a trait that was not among them.
    """
    for variants in VARIANTS.values():
        seen = set[tuple[str, str]]()
        for i, arch in enumerate(SHARED_LIMIT):
            of_arch = [variant for variant in variants if arch in variant.archs()]
            variant = of_arch[i * (len(of_arch) // len(SHARED_LIMIT) + 1) % len(of_arch)]
            seen |= traits(variant)
            yield variant, arch
        for i, variant in enumerate(variants):
            if traits(variant) - seen:
                seen |= traits(variant)
                yield variant, variant.archs()[i % len(variant.archs())]


def everything() -> Iterator[tuple[Variant, int]]:
    for variants in VARIANTS.values():
        yield from ((variant, arch) for variant in variants for arch in variant.archs())
