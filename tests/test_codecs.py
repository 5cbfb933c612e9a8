"""Codecs of gradients: sizes are the table's, what is decoded is what was promised, bad names are refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.comm import CODECS
from headway.comm.compression.torch_codecs import codec_of
from headway.comm.compression.torch_dense import pack, pack_places, unpack, unpack_places
from headway.core.errors import InputError, UnknownNameError
from headway.cost.codecs import CodecTimes, place_bytes, read_codec, wire_bytes
from tests.refusals import refused

NAMES = (
    "half", "bfloat16", "sign", "topk:0.01", "topk:0.001:bf16:exact", "topk:0.3:f16", "topk:1", "randomk:0.01",
    "randomk:0.2:bf16", "shared-randomk:0.001", "dither:1", "dither:4", "dither:127", "natural:4", "int8",
)  # fmt: skip
MILLION = 1_000_000


def numbers(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NAMES)
def test_a_packet_has_the_bytes_of_the_table_and_decodes_to_as_many_numbers(name: str) -> None:
    codec = codec_of(name)
    for n in [*range(301), MILLION]:
        packet = codec.encode(numbers(n))

        assert (packet.dtype, packet.numel()) == (torch.uint8, wire_bytes(name, n))
        assert codec.decode(packet, n).shape == (n,)


@given(values=st.lists(st.integers(0, 255), max_size=70), bits=st.integers(1, 8))
def test_packed_numbers_come_back(values: list[int], bits: int) -> None:
    small = torch.tensor([value % (1 << bits) for value in values], dtype=torch.int64)
    packed = pack(small, bits)

    assert packed.numel() == math.ceil(len(values) * bits / 8)
    assert unpack(packed, bits, len(values)).tolist() == small.tolist()
    # The oracle: one large whole number in which value i stands at bit i * bits.
    whole = sum(value << (bits * index) for index, value in enumerate(small.tolist()))
    assert int.from_bytes(bytes(packed.tolist()), "little") == whole


@given(st.data())
def test_places_come_back_in_about_two_bits_more_than_their_low_bits(data: st.DataObject) -> None:
    n = data.draw(st.one_of(st.integers(1, 400), st.integers(1, 1 << 40)))
    places = sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=40)))
    packed = pack_places(torch.tensor(places, dtype=torch.int64), n)

    assert unpack_places(packed, n, len(places)).tolist() == places
    assert packed.numel() == sum(place_bytes(n, len(places)))
    assert packed.numel() * 8 <= len(places) * (math.log2(max(n / max(len(places), 1), 1)) + 3) + 16


def test_a_thousandth_in_bfloat16_takes_a_five_hundredth_of_half_precision() -> None:
    # The paper's 333x are 4 bytes of place and 2 of value each.
    assert (wire_bytes("topk:0.001:bf16", MILLION) or 0) <= MILLION / 250


@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.1, 0.6])
@pytest.mark.parametrize("kind", ["normal", "periodic", "equal", "few"])
def test_sampled_topk_keeps_exactly_k_and_nearly_all_of_the_mass(fraction: float, kind: str) -> None:
    n = 300_000
    x = numbers(n) ** 3
    if kind == "periodic":  # what lies between the sampled ones is large
        x = torch.where(torch.arange(n) % 64 == 0, x, x * 100)
    elif kind == "equal":
        x = torch.ones(n)
    elif kind == "few":
        x = torch.zeros(n).index_fill_(0, torch.arange(0, n, 777), 3.0)
    decoded = CODECS["topk"](fraction).decode(CODECS["topk"](fraction).encode(x), n)
    largest = x.abs().topk(int(fraction * n)).values

    assert int((decoded != 0).sum()) == min(int(fraction * n), int((x != 0).sum()))
    assert float(decoded.abs().sum()) >= 0.95 * float(largest.sum())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dither:1", "dither:4", "dither:100", "natural:1", "natural:4"])
def test_dithering_is_right_on_average(name: str) -> None:
    codec, x, rounds = codec_of(name), numbers(40), 4_000
    found = torch.stack([codec.decode(codec.encode(x, seed), 40) for seed in range(rounds)])
    error = found.std(0) / rounds**0.5 + 1e-6

    assert bool(((found.mean(0) - x).abs() < 4.5 * error).all())


@pytest.mark.parametrize("name", [name for name in NAMES if codec_of(name).biased])
def test_what_a_biased_codec_leaves_out_is_less_than_what_it_got(name: str) -> None:
    x = numbers(5_000)
    codec = codec_of(name)
    left = x - codec.decode(codec.encode(x), x.numel())

    assert float(left.norm()) < float(x.norm())


def test_the_sign_codec_contracts_as_its_formula_says() -> None:
    x = numbers(1_001)
    left = x - codec_of("sign").decode(codec_of("sign").encode(x), x.numel())
    delta = float(x.abs().sum() ** 2 / (x.numel() * x.norm() ** 2))

    assert float(left.norm() ** 2) == pytest.approx((1 - delta) * float(x.norm() ** 2), rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros_and_large_numbers_stay_finite(name: str) -> None:
    codec = codec_of(name)
    assert codec.decode(codec.encode(torch.zeros(77)), 77).abs().max() == 0
    large = torch.full((77,), 3e38)
    assert bool(torch.isfinite(codec.decode(codec.encode(large), 77)).all())


@given(
    st.sampled_from([name for name in (*NAMES, "natural:1", "natural:2", "natural:127") if name != "sign"]), st.data()
)
def test_a_zero_beside_others_stays_zero(name: str, data: st.DataObject) -> None:
    """But for one bit per number, which has no zero: there the residual takes it back."""
    codec, n = codec_of(name), data.draw(st.integers(1, 300))
    rest = st.sampled_from([0.0, 0.0, 0.0, 1e-30, -0.5, 3.0, 431.0])
    x = torch.tensor(data.draw(st.lists(rest, min_size=n, max_size=n)))

    assert codec.decode(codec.encode(x, 5), n, 5)[x == 0].abs().sum() == 0


def test_the_table_answers_for_an_unknown_kind_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean .topk.\?"):
        CODECS["TOPK"]


test_a_wrong_name_is_refused_with_the_rule = refused(
    ("topc:0.1", r"unknown codec 'topc'. Did you mean 'topk'"),
    ("topk", r"needs its amount. Write for example topk:0.01"),
    ("topk:0", r"k is '0'; write a fraction in \(0, 1\]"),
    ("topk:-0.1", "k is '-0.1'"),
    ("topk:1.5", "k is '1.5'"),
    ("topk:nan", "k is 'nan'"),
    ("topk:0.1:int3", "'int3' is not an argument of topk. Write it as topk:FRACTION:f32|bf16|f16:exact"),
    ("sign:3", "'3' is not an argument of sign. Write it as sign"),
    ("dither:0", r"not a number of levels; write a whole one, 1\.\.127"),
    ("dither:128", "not a number of levels"),
    by=read_codec,
    error=(InputError, UnknownNameError),
)


def test_more_numbers_than_there_are_cannot_be_kept() -> None:
    assert CODECS["topk"](5).encode(numbers(5)).numel() == wire_bytes("topk:5", 5)
    with pytest.raises(InputError, match="keep 6 of 5 numbers; k must be at most n"):
        CODECS["topk"](6).encode(numbers(5))


def test_times_between_measured_sizes_lie_between_and_unmeasured_codecs_are_refused() -> None:
    rows = [{"codec": "sign", "numel": n, "encode_s": n * 1e-9, "decode_s": n * 2e-9} for n in (1_000, 100_000)]
    times = CodecTimes.from_json({"rows": rows})

    assert times.seconds("sign", 10_000) == pytest.approx((1e-5, 2e-5))
    assert times.seconds("sign", 10) == pytest.approx((1e-6, 2e-6))
    assert times.seconds("sign", 1_000_000) == pytest.approx((1e-3, 2e-3))
    with pytest.raises(InputError, match=r"half was not measured on this host \(measured: sign\).*comm bench"):
        times.seconds("half", 10)
    with pytest.raises(InputError, match="is not positive"):
        CodecTimes.from_json({"rows": [{"codec": "sign", "numel": 5, "encode_s": 0, "decode_s": 1}]})


def test_what_half_precision_cannot_hold_is_told_before_it_is_sent():
    x = torch.tensor([1.0, -65504.0])

    assert codec_of("half").fits(x)
    assert not codec_of("half").fits(2 * x)
    assert codec_of("bfloat16").fits(2 * x)
    assert codec_of("half").fits(x[:0])
