"""Link rates are read as `tc` reads them, printed so that they read back, and refused in words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.efa.emulate.rate import Rate, parse_rate, token_bucket
from megatron.efa.errors import EfaError


@pytest.mark.parametrize(
    ("text", "bits"),
    [("500mbit", 500e6), ("2gbit", 2e9), ("2.5gbit", 2.5e9), (" 10Gbit ", 10e9), ("4000kbit", 4e6)],
)
def test_units_are_decimal(text, bits):
    assert parse_rate(text).bits_per_second == bits


def test_none_is_unshaped():
    assert parse_rate("none") is None


@pytest.mark.parametrize(
    "text", ["", "1", "gbit", "1gbps", "1 gbit", "-1gbit", "1e3mbit", "1gib", "0mbit", "100gbit"]
)
def test_what_is_no_rate_is_refused_with_a_way_to_write_it(text):
    with pytest.raises(EfaError, match=r"mbit.*none"):
        parse_rate(text)


def test_a_fraction_of_a_bit_is_refused():
    with pytest.raises(EfaError, match="whole number"):
        parse_rate("1000000.5bit")


@given(st.integers(10**6, 34 * 10**9))
def test_a_printed_rate_reads_back(bits):
    assert parse_rate(str(Rate(bits))) == Rate(bits)


@given(st.decimals(1, 34, places=3))
def test_decimal_rates_lose_nothing(gbits):
    assert parse_rate(f"{gbits}gbit").bits_per_second == int(gbits * 10**9)


@given(st.integers(10**6, 34 * 10**9))
def test_the_bucket_passes_a_whole_segment_and_fits_the_kernels_fields(bits):
    bucket = token_bucket(Rate(bits))
    assert bucket.rate == pytest.approx(bits / 8, abs=1)
    assert bucket.burst > 65536 + 8 * 66  # a 64 KiB segment cut to the MTU, headers included
    assert bucket.burst <= max(72 * 1024, bucket.rate / 1000)
    assert bucket.burst < bucket.limit < 2**32
    assert bucket.rate < 2**32
