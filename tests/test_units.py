import pytest
from hypothesis import given
from hypothesis import strategies as st

from kumi.errors import ConfigError
from kumi.units import (
    format_bytes,
    format_count,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_duration,
    parse_flops,
    write_bandwidth,
    write_bytes,
    write_duration,
    write_flops,
)


def test_quantities_are_read_in_base_units():
    assert parse_bytes("80 GiB") == 80 * 2**30
    assert parse_bytes("1.5GB") == 1_500_000_000


@pytest.mark.parametrize("text", ["80", "GiB", "80 gib", "-1 GB", ""])
def test_what_is_no_quantity_is_refused(text):
    with pytest.raises(ConfigError, match="is not a quantity"):
        parse_bytes(text)


def test_quantities_are_written_with_three_digits():
    assert [format_bytes(count) for count in (0, 1023, 1536, 1010 * 2**20, 80 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1010 MiB",
        "80 GiB",
    ]
    assert [format_count(count) for count in (7, 1234, 8_030_261_248, 15e12)] == ["7", "1.23k", "8.03B", "15T"]
    assert [format_seconds(count) for count in (42, 185, 4320, 183600)] == ["42s", "3m05s", "1h12m", "2d03h"]


def test_rates_and_durations_are_read_in_base_units():
    assert parse_bandwidth("3.35 TB/s") == 3.35e12
    assert parse_bandwidth("400 Gb/s") == 50e9
    assert parse_flops("989.4 TFLOP/s") == 989.4e12
    assert parse_duration("25 us") == 25e-6


def test_a_duration_may_have_parts_from_large_to_small():
    assert parse_duration("24h") == 86400
    assert parse_duration("1d12h30m") == parse_duration(" 1d 12h 30 m ") == 131_400
    assert parse_duration("1.5 h") == 5400
    assert parse_duration("1m0.5s") == 60.5
    assert parse_duration("15s") == 15


@pytest.mark.parametrize("text", ["", "90", "m", "1 day", "30m1h", "1h1h", "1h-5m", "-1h", "1-12:00:00", "1h 5", "h1m"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ConfigError, match="is not a duration; write a number and one of d, h, m, s, ms, us, ns"):
        parse_duration(text)


@pytest.mark.parametrize("read", [parse_bandwidth, parse_flops])
def test_a_rate_in_another_s_unit_is_refused(read):
    with pytest.raises(ConfigError, match="is not a quantity"):
        read("3 GB")


@given(st.floats(1e-9, 1e18, allow_subnormal=False))
def test_what_is_written_is_read_back_to_the_last_digit(value):
    assert parse_bandwidth(write_bandwidth(value)) == value
    assert parse_flops(write_flops(value)) == value
    assert parse_duration(write_duration(value)) == value
    assert parse_bytes(write_bytes(int(value))) == int(value)
