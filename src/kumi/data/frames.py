"""Decompress .gz and .zst files in bounded memory and linear time, whatever a frame expands to.

A frame of 100 kB may hold gigabytes, so no call of a library may decompress as much as it likes. zlib takes a limit;
the streaming object of zstandard takes none, but a block of Zstandard holds at most 128 KiB (RFC 8878, section
3.1.1.2), so it is fed a few blocks at a time.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from kumi.files.untrusted import open_stream

_INPUT, _OUTPUT = 1 << 16, 1 << 20
_MAGIC, _SKIPPED_MAGIC, _BLOCK = 0xFD2FB528, 0x184D2A5, 1 << 17


class Frame(Protocol):
    """One compressed frame. After `decompress`, `rest` is the input that has to be given again, followed by more."""

    rest: bytes
    ended: bool

    def decompress(self, data: bytes) -> bytes:
        """Return at most about 1 MiB of what `data` holds."""


class GzipFrame:
    """A member of a gzip file."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(wbits=31)
        self.rest, self.ended = b"", False

    def decompress(self, data: bytes) -> bytes:
        """Return at most 1 MiB of what `data` holds."""
        output = self._member.decompress(data, _OUTPUT)
        self.ended = self._member.eof
        self.rest = self._member.unused_data if self.ended else self._member.unconsumed_tail
        return output


class ZstdFrame:
    """A frame of a Zstandard file, which may be one to skip; `decompressor` is a zstandard.ZstdDecompressor."""

    def __init__(self, decompressor: Any) -> None:
        self._frame = decompressor.decompressobj()
        self._begun, self._checksum, self._skip = False, 0, 0
        self.rest, self.ended = b"", False

    def decompress(self, data: bytes) -> bytes:
        """Return at most 1 MiB of what `data` holds; nothing when it ends within a block."""
        end = self._blocks(data) if self._begun else 0 if self._skip else self._header(data)
        if self._skip:
            end = min(self._skip, len(data))
            self._skip -= end
            self.ended = self._skip == 0
            self.rest = data[end:]
            return b""
        self.rest = data[end:]
        return bytes(self._frame.decompress(data[:end])) if end else b""

    def _header(self, data: bytes) -> int:
        """Return the length of the frame's header; 0 when `data` does not hold all of it, or the frame is skipped."""
        if len(data) < 8:
            return 0
        magic, flags = int.from_bytes(data[:4], "little"), data[4]
        if magic >> 4 == _SKIPPED_MAGIC:
            self._skip = 8 + int.from_bytes(data[4:8], "little")
            return 0
        if magic != _MAGIC:
            raise ValueError("no frame of Zstandard begins here")
        single, self._checksum = bool(flags & 32), 4 * bool(flags & 4)
        size = 5 + (not single) + (0, 1, 2, 4)[flags & 3] + (int(single), 2, 4, 8)[flags >> 6]
        self._begun = len(data) >= size
        return size if self._begun else 0

    def _blocks(self, data: bytes) -> int:
        """Return the length of the whole blocks at the beginning of `data` that make no more than 1 MiB."""
        end = 0
        for _ in range(_OUTPUT // _BLOCK):
            header = int.from_bytes(data[end : end + 3], "little")
            last, one_byte, size = header & 1, header >> 1 & 3 == 1, header >> 3
            length = 3 + (1 if one_byte else size) + self._checksum * last
            if len(data) - end < max(3, length):
                break
            end += length
            if last:
                self.ended = True
                break
        return end


class Frames(io.RawIOBase):
    """The uncompressed bytes of a file of compressed frames, one after the other.

    All that can be decompressed is passed on before an error. EOFError where the data are damaged or cut off.
    """

    def __init__(self, path: Path, new_frame: Callable[[], Frame]) -> None:
        super().__init__()
        self._new_frame, self._file = new_frame, open_stream(path, follow=True)
        self._frame: Frame | None = None
        self._begun = False
        self._input, self._ready, self._at = b"", b"", 0

    def readable(self) -> bool:
        """True: this is a stream to read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` as far as one piece of output goes; 0 at the end."""
        while self._at == len(self._ready):
            if not self._advance():
                return 0
        count = min(len(buffer), len(self._ready) - self._at)
        buffer[:count] = self._ready[self._at : self._at + count]
        self._at += count
        return count

    def _advance(self) -> bool:
        """Decompress the next piece, which may be empty; False at the end of the file."""
        if self._frame is None:
            self._input = self._input or self._file.read(_INPUT)
            if not self._input:
                return False
            if self._begun:  # some programs fill up what follows a frame with zeros
                self._input = self._input.lstrip(b"\0")
                if not self._input:
                    return True
            self._begun, self._frame = True, self._new_frame()
        try:
            self._ready, self._at = self._frame.decompress(self._input), 0
        except Exception as error:  # each library has its own kind
            raise EOFError(f"the compressed data is damaged: {error}") from error
        waiting, self._input = len(self._input), self._frame.rest
        if self._frame.ended:
            self._frame = None
        elif not self._ready and len(self._input) == waiting:
            more = self._file.read(_INPUT)
            if not more:
                raise EOFError("the compressed file ends in the middle")
            self._input += more
        return True

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()
