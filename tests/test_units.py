import pytest

from kumi.errors import ConfigError
from kumi.units import format_bytes, format_count, format_seconds, parse_bytes


def test_quantities_are_read_in_base_units():
    assert parse_bytes("80 GiB") == 80 * 2**30
    assert parse_bytes("1.5GB") == 1_500_000_000


@pytest.mark.parametrize("text", ["80", "GiB", "80 gib", "-1 GB", ""])
def test_what_is_no_quantity_is_refused(text):
    with pytest.raises(ConfigError, match="is not a quantity"):
        parse_bytes(text)


def test_quantities_are_written_with_three_digits():
    assert [format_bytes(count) for count in (0, 1023, 1536, 1010 * 2**20, 80 * 2**30)] == [
        "0 B", "1023 B", "1.5 KiB", "1010 MiB", "80 GiB"]  # fmt: skip
    assert [format_count(count) for count in (7, 1234, 8_030_261_248, 15e12)] == ["7", "1.23k", "8.03B", "15T"]
    assert [format_seconds(count) for count in (42, 185, 4320, 183600)] == ["42s", "3m05s", "1h12m", "2d03h"]
