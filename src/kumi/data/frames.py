"""Decompress .gz and .zst files in bounded memory and linear time.

A frame of 100 kB may expand to gigabytes, so each library call needs a bound on its output. zlib accepts a limit. The
streaming object of zstandard does not, but a Zstandard block expands to at most 128 KiB (RFC 8878, section 3.1.1.2), so
that object gets a few blocks per call.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from kumi.files.untrusted import open_stream

# Bytes that are read at a time, and the most bytes that one call decompresses.
_INPUT, _OUTPUT = 1 << 16, 1 << 20
# Of Zstandard: the magic number of a frame, that of a skippable frame without its last four bits, and the most bytes of
# an uncompressed block.
_MAGIC, _SKIPPED_MAGIC, _BLOCK = 0xFD2FB528, 0x184D2A5, 1 << 17


class Frame(Protocol):
    """Decompressor of one frame.

    rest: unused input after a call of `decompress`; pass it again, followed by more input.
    ended: True after the end of the frame.
    """

    rest: bytes
    ended: bool

    def decompress(self, data: bytes) -> bytes:
        """Decompress the start of `data`; return at most about 1 MiB."""


class GzipFrame:
    """Decompressor of one member of a gzip file."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(wbits=31)
        self.rest, self.ended = b"", False

    def decompress(self, data: bytes) -> bytes:
        """Decompress the start of `data`; return at most 1 MiB."""
        output = self._member.decompress(data, _OUTPUT)
        self.ended = self._member.eof
        self.rest = self._member.unused_data if self.ended else self._member.unconsumed_tail
        return output


class ZstdFrame:
    """Decompressor of one Zstandard frame, also a skippable one; `decompressor` is a zstandard.ZstdDecompressor."""

    def __init__(self, decompressor: Any) -> None:
        self._frame = decompressor.decompressobj()
        self._header_read, self._checksum, self._skip = False, 0, 0
        self.rest, self.ended = b"", False

    def decompress(self, data: bytes) -> bytes:
        """Decompress the full blocks at the start of `data`; return at most 1 MiB, b"" when no block is complete."""
        end = self._blocks(data) if self._header_read else 0 if self._skip else self._header(data)
        if self._skip:
            end = min(self._skip, len(data))
            self._skip -= end
            self.ended = self._skip == 0
            self.rest = data[end:]
            return b""
        self.rest = data[end:]
        return bytes(self._frame.decompress(data[:end])) if end else b""

    def _header(self, data: bytes) -> int:
        """Return the length of the frame's header; 0 when `data` is shorter than the header, or the frame is
        skippable."""
        if len(data) < 8:
            return 0
        magic, flags = int.from_bytes(data[:4], "little"), data[4]
        if magic >> 4 == _SKIPPED_MAGIC:
            self._skip = 8 + int.from_bytes(data[4:8], "little")
            return 0
        if magic != _MAGIC:
            raise ValueError("no Zstandard frame begins here")
        # Magic number and flags, then window, dictionary id and size of the content (RFC 8878, section 3.1.1.1).
        single, self._checksum = bool(flags & 32), 4 * bool(flags & 4)
        size = 5 + (not single) + (0, 1, 2, 4)[flags & 3] + (int(single), 2, 4, 8)[flags >> 6]
        self._header_read = len(data) >= size
        return size if self._header_read else 0

    def _blocks(self, data: bytes) -> int:
        """Return the length of the complete blocks at the start of `data` that expand to at most 1 MiB."""
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
    """Raw stream of the uncompressed bytes of a file, which is a sequence of compressed frames.

    Reading returns all bytes before a fault, then raises EOFError for damaged or truncated data.
    """

    def __init__(self, path: Path, new_frame: Callable[[], Frame]) -> None:
        super().__init__()
        self._new_frame, self._file = new_frame, open_stream(path, follow=True)
        self._frame: Frame | None = None
        self._after_frame = False
        self._input, self._ready, self._at = b"", b"", 0

    def readable(self) -> bool:
        """Return True: the stream is readable."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Copy decompressed bytes to `buffer`, from at most one output chunk; return their number, 0 at the end."""
        while self._at == len(self._ready):
            if not self._advance():
                return 0
        count = min(len(buffer), len(self._ready) - self._at)
        buffer[:count] = self._ready[self._at : self._at + count]
        self._at += count
        return count

    def _advance(self) -> bool:
        """Decompress the next output chunk, which may be empty; return False at the end of the file."""
        if self._frame is None:
            self._input = self._input or self._file.read(_INPUT)
            if not self._input:
                return False
            if self._after_frame:  # some programs pad with zeros after a frame
                self._input = self._input.lstrip(b"\0")
                if not self._input:
                    return True
            self._after_frame, self._frame = True, self._new_frame()
        try:
            self._ready, self._at = self._frame.decompress(self._input), 0
        except Exception as error:  # each library raises its own class
            raise EOFError(f"the compressed data is damaged: {error}") from error
        offered, self._input = len(self._input), self._frame.rest
        if self._frame.ended:
            self._frame = None
        elif not self._ready and len(self._input) == offered:
            more = self._file.read(_INPUT)
            if not more:
                raise EOFError("the compressed file is truncated")
            self._input += more
        return True

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()
