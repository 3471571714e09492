import pytest

from cutlass_ops.base import units


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GB", 2_000_000_000),
        ("1.5 GiB", 3 << 29),
        ("4096", 4096),
        ("500mb", 500_000_000),
        (" 1TB ", 10**12),
        ("7B", 7),
    ],
)
def test_sizes(text, size):
    assert units.size(text, "--keep") == size


@pytest.mark.parametrize(("text", "seconds"), [("30d", 30 * 86400), ("1.5h", 5400), ("2W", 14 * 86400), ("0d", 0)])
def test_durations(text, seconds):
    assert units.duration(text, "--age") == seconds


@pytest.mark.parametrize("text", ["", "GB", "2XB", "-1GB", "1e9", "0", "0.5", "nan", "٣GB", "2GB3", "9" * 400])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match=r"^--keep is '.*': a size such as 2GB"):
        units.size(text, "--keep")


@pytest.mark.parametrize("text", ["", "d", "-1d", "30x", "30", "nan", "inf", "1d2"])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match=r"^--age is '.*': a time such as 30d"):
        units.duration(text, "--age")
