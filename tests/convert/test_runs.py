"""Copies of bytes without torch, by every system call, through buffers of any size, and their checks."""

import errno
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kumi.convert import convert
from kumi.convert.files import byte_runs, casts, stream
from kumi.convert.hf import write_folder
from kumi.convert.open_model import open_source
from kumi.errors import RefusedError
from kumi.storage import checkpoint


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def same_bits(first, other):
    return first.keys() == other.keys() and all(
        value.dtype == other[name].dtype and torch.equal(bits(value), bits(other[name]))
        for name, value in first.items()
    )


def bits(value):
    return value.contiguous().view(torch.uint8)


def fill_with_any_bits(folder: Path) -> None:
    """Not-a-numbers of all kinds, infinities and negative zeros among them."""
    generator = torch.Generator().manual_seed(0)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for value in tensors.values():
            words = torch.randint(-(2**15), 2**15, (value.nbytes // 2,), dtype=torch.int16, generator=generator)
            value.view(-1).view(torch.int16).copy_(words)
        save_file(tensors, file, metadata={"format": "pt"})


def without_torch(*words: str, more: tuple[str, ...] = ()) -> None:
    """Run `kumi` with these words, and fail where it imports torch, or NumPy, unless that is in `more`."""
    program = (
        "import sys; from kumi.cli import main\n"
        f"code = main({list(words)!r})\n"
        f"heavy = ({{'torch', 'numpy', 'transformers'}} - {set(more)!r}) & set(sys.modules)\n"
        "assert not code and not heavy, (code, heavy)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_bytes_are_copied_without_torch(saved, tmp_path):
    """Whichever formats, and with a dtype that is the source's."""
    source = saved("llama", torch.bfloat16, max_shard_size="20KB")
    fill_with_any_bits(source)
    native = str(tmp_path / "native")
    without_torch("convert", str(source), native, "--to", "kumi")
    without_torch("convert", native, str(tmp_path / "again"), "--to", "kumi")
    without_torch("convert", str(tmp_path / "again"), str(tmp_path / "back"), "--to", "hf")
    without_torch("convert", str(source), str(tmp_path / "same"), "--to", "hf", "--dtype", "bfloat16")
    assert same_bits(tensors(source), tensors(tmp_path / "back"))
    assert same_bits(tensors(source), tensors(tmp_path / "same"))
    checkpoint.open(native).verify()
    checkpoint.open(tmp_path / "again").verify()


@pytest.mark.parametrize("case", ["gpt2-wide", "gpt-neox", "mixtral", "gpt-oss", "phi3-partial"])
def test_files_are_copied_to_files_without_torch(case, saved, tmp_path):
    """Also where kumi has tensors transposed or stacked."""
    source = saved(case)
    without_torch("convert", str(source), str(tmp_path / "new"), "--to", "hf")
    assert same_bits(tensors(source), tensors(tmp_path / "new"))


@pytest.mark.parametrize("ways", [(), ("copy_file_range",), ("copy_file_range", "sendfile")])
@pytest.mark.parametrize("kernel_bytes", [1000, 2**25])
def test_bits_are_the_same_whatever_the_kernel_copies(ways, kernel_bytes, saved, tmp_path, monkeypatch):
    def refused(*arguments):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    source = saved("llama", torch.bfloat16)
    fill_with_any_bits(source)
    monkeypatch.setattr(byte_runs, "KERNEL_BYTES", kernel_bytes)
    monkeypatch.setattr(stream, "BUFFER_BYTES", 96)
    for way in ways:
        monkeypatch.setattr(os, way, refused)
    convert(source, tmp_path / "new", to="hf", verify=False)
    assert same_bits(tensors(source), tensors(tmp_path / "new"))


@pytest.mark.parametrize("layout", ["pp=2", "dp_shard=2,zero=3", "tp=2"])
@pytest.mark.parametrize("buffer_bytes", [40, 2**18])
def test_bits_are_the_same_through_buffers_of_any_size(layout, buffer_bytes, saved, tmp_path, monkeypatch):
    """Blocks with checksums begin and end anywhere in the buffer, in the source and in the target."""
    monkeypatch.setattr(stream, "BUFFER_BYTES", buffer_bytes)
    monkeypatch.setattr("kumi.storage.write.BLOCK_BYTES", 700)
    source = saved("mixtral", torch.bfloat16)
    fill_with_any_bits(source)
    convert(source, tmp_path / "cut", to="kumi", layout=layout, verify=False)
    convert(tmp_path / "cut", tmp_path / "whole", to="kumi", verify=False)
    convert(tmp_path / "whole", tmp_path / "back", to="hf", verify=False)
    assert same_bits(tensors(source), tensors(tmp_path / "back"))
    for name in ("cut", "whole"):
        checkpoint.open(tmp_path / name).verify()


@pytest.mark.parametrize(
    ("before", "after"),
    [("bfloat16", "float32"), ("float32", "bfloat16"), ("float32", "float16"), ("float16", "float64")],
)
@pytest.mark.parametrize("buffer_bytes", [104, 2**18])
def test_casts_are_those_of_pytorch(before, after, buffer_bytes, saved, tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "BUFFER_BYTES", buffer_bytes)
    monkeypatch.setattr("kumi.storage.write.BLOCK_BYTES", 700)
    source = saved("llama", getattr(torch, before))
    expected = {name: value.to(getattr(torch, after)) for name, value in tensors(source).items()}
    convert(source, tmp_path / "files", to="hf", dtype=after, verify=False)
    convert(source, tmp_path / "native", to="kumi", dtype=after, verify=False)
    convert(tmp_path / "native", tmp_path / "back", to="hf", verify=False)
    assert same_bits(expected, tensors(tmp_path / "files"))
    assert same_bits(expected, tensors(tmp_path / "back"))


@pytest.mark.parametrize("before", ["bfloat16", "float32"])
def test_casts_of_any_bits_are_those_of_pytorch(before):
    """Infinities, negative zeros, denormal numbers, and numbers that round to infinity; not-a-numbers stay that."""
    after = "float32" if before == "bfloat16" else "bfloat16"
    words = torch.randint(-(2**31), 2**31, (2**15,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    words[:6] = torch.tensor([0x7F7FFFFF, 0x7F800000, -0x80000000, 0x00018000, 0x00008000, 0x3F808000])
    values = words.view(getattr(torch, before))
    cast = casts.make_cast(before, after, values.numel())
    numbers = values.nan_to_num(1.0) if before == "float32" else values
    converted = torch.frombuffer(
        bytearray(cast(memoryview(numbers.view(torch.uint8).numpy()))), dtype=getattr(torch, after)
    )
    assert torch.equal(bits(converted), bits(numbers.to(converted.dtype)))
    converted = torch.frombuffer(
        bytearray(cast(memoryview(values.view(torch.uint8).numpy()))), dtype=getattr(torch, after)
    )
    assert torch.equal(converted.isnan(), values.isnan())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_these_casts_need_no_torch(dtype, saved, tmp_path):
    source = saved("llama", torch.float32 if dtype == "bfloat16" else torch.bfloat16)
    without_torch("convert", str(source), str(tmp_path / "new"), "--to", "hf", "--dtype", dtype, more=("numpy",))
    expected = {name: value.to(getattr(torch, dtype)) for name, value in tensors(source).items()}
    assert same_bits(expected, tensors(tmp_path / "new"))


@pytest.mark.parametrize("damage", ["a bit", "the end"])
def test_damage_is_seen_while_bytes_are_copied(damage, saved, tmp_path):
    """In a checkpoint that was complete when it was opened."""
    convert(saved(), tmp_path / "native", to="kumi", verify=False)
    source = open_source(tmp_path / "native")
    shard = max((tmp_path / "native").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data if damage == "a bit" else data[:-1])
    with pytest.raises(RefusedError, match=rf"{shard.name}: the checkpoint is damaged: the checksum of 'model/"):
        write_folder.write_hf_folder(
            tmp_path / "new",
            source.spec,
            source.reader,
            base_config=source.config,
            dtype=source.dtypes,
            tokenizer_folder=None,
            card="",
        )
    assert [path.name for path in tmp_path.iterdir() if "new" in path.name] == []


def test_checksums_of_blocks_are_those_of_their_bytes():
    data = bytes(range(256)) * 5
    sums = byte_runs.Sums(300)
    for low in range(0, len(data), 77):
        sums.add(memoryview(data)[low : low + 77])
    assert sums.sums == [zlib.crc32(data[low : low + 300]) for low in range(0, len(data), 300)]
