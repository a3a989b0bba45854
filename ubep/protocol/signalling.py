"""How completion travels: a flag word behind the data, or inside it.

A codec turns records into what is put on the wire and tells when they have arrived:

word      records as they are; a flag word follows, ordered by release.
fused     blocks of `atomic_block` bytes, the last 1/16 of each (at least 4 bytes) a flag with the epoch
          (the paper's TFF: 480 + 32; NCCL's LL128: 120 + 8 and LL: 4 + 4). Needs blocks written whole.
checksum  records as they are; a flag word with their CRC-32, in no particular order to them (the paper's
          DC). A run is one chunk: nothing can be read before all of it is there.
sentinel  the receiver pre-fills a pattern and sees the last 8 bytes of every block change (the paper's
          SP). Needs blocks written whole. A payload that holds the pattern is escaped: words that are
          watched are XORed with a salt, stored in front of the record, for which none equals it.
"""

from __future__ import annotations

import ctypes
import zlib

import torch
from torch import Tensor
from torch.nn.functional import pad

from ubep.capabilities import Signalling
from ubep.protocol.records import align

# Four bf16 / fp16 or two fp32 NaNs with a payload that no arithmetic produces; never two metadata words.
SENTINEL_BYTES = b"\xa5\xff" * 4
SENTINEL = int.from_bytes(SENTINEL_BYTES, "little", signed=True)


def checksum(data: Tensor) -> int:
    """CRC-32 of a contiguous uint8 tensor."""
    data = data.cpu().contiguous()
    if data.numel() == 0:
        return zlib.crc32(b"")
    return zlib.crc32((ctypes.c_char * data.numel()).from_address(data.data_ptr()))


def _int32(epoch: int) -> int:
    """An epoch as the signed 32-bit integer of the same bits."""
    return epoch - ((epoch >> 31) << 32)


class WordCodec:
    """Bare records followed by a flag word; also the base of the others."""

    flagged = True  # a flag word accompanies every chunk
    reads_data = False  # whether `arrived` looks at the records

    def wire_bytes(self, record_bytes: int) -> int:
        """Bytes that one record takes on the wire and in the window."""
        return record_bytes

    def encode(self, records: Tensor, epoch: int) -> Tensor:
        """uint8 [n, record_bytes] -> uint8 [n, wire_bytes]."""
        return records

    def decode(self, wire: Tensor, record_bytes: int) -> Tensor:
        """The inverse of encode."""
        return wire

    def payload(self, wire: Tensor, done: int) -> int:
        """What the flag word says besides the epoch: how many records are done."""
        return done

    def arrived(self, wire: Tensor | None, epoch: int, payload: int | None, done: int) -> bool:
        """Whether the records in `wire` are complete, given the flag word's payload if it has this epoch."""
        return payload is not None and payload >= done

    def fill(self, wire: Tensor) -> None:
        """Prepare (zeroed) window memory before its first use, and after each use."""

    def forget(self, data: Tensor) -> None:
        """Remove epochs that lie in window memory, at a wrap; see flags.clears_other_parity."""


class ChecksumCodec(WordCodec):
    reads_data = True

    def payload(self, wire: Tensor, done: int) -> int:
        return checksum(wire)

    def arrived(self, wire: Tensor | None, epoch: int, payload: int | None, done: int) -> bool:
        assert wire is not None
        return payload is not None and checksum(wire) == payload


class FusedCodec(WordCodec):
    flagged = False
    reads_data = True

    def __init__(self, block: int) -> None:
        self.block = block
        self.flag = max(4, block // 16)
        self.data = block - self.flag

    def wire_bytes(self, record_bytes: int) -> int:
        return -(-record_bytes // self.data) * self.block

    def encode(self, records: Tensor, epoch: int) -> Tensor:
        padded = pad(records, (0, -records.shape[1] % self.data))
        blocks = padded.reshape(len(records), padded.shape[1] // self.data, self.data)
        shape = (*blocks.shape[:2], self.flag // 4)
        flags = torch.full(shape, _int32(epoch), dtype=torch.int32, device=records.device)
        return torch.cat((blocks, flags.view(torch.uint8)), 2).flatten(1)

    def decode(self, wire: Tensor, record_bytes: int) -> Tensor:
        return self._blocks(wire)[:, :, : self.data].flatten(1)[:, :record_bytes]

    def arrived(self, wire: Tensor | None, epoch: int, payload: int | None, done: int) -> bool:
        assert wire is not None
        flags = self._blocks(wire).view(torch.int32)[:, :, self.data // 4]
        return bool((flags == _int32(epoch)).all())

    def forget(self, data: Tensor) -> None:
        data.zero_()

    def _blocks(self, wire: Tensor) -> Tensor:
        return wire.reshape(len(wire), wire.shape[1] // self.block, self.block)


class SentinelCodec(WordCodec):
    flagged = False
    reads_data = True
    SALT = 8

    def __init__(self, block: int) -> None:
        self.block = block

    def wire_bytes(self, record_bytes: int) -> int:
        return align(record_bytes + self.SALT, self.block)

    def _watched(self, words: Tensor) -> Tensor:
        """The last 8 bytes of each block, of int64 words [n, wire_bytes / 8]."""
        return words[:, self.block // 8 - 1 :: self.block // 8]

    def encode(self, records: Tensor, epoch: int) -> Tensor:
        n, size = records.shape
        tail = self.wire_bytes(size) - size - self.SALT
        wire = pad(records, (self.SALT, tail))
        words = wire.view(torch.int64)
        first = words[:, 0].clone()
        watched = self._watched(words)
        plain = watched.clone()
        salt = torch.zeros(n, 1, dtype=torch.int64, device=records.device)
        while (hit := ((plain ^ salt) == SENTINEL).any(1, keepdim=True)).any():
            salt += hit
        watched.copy_(plain ^ salt)
        words[:, 0] = first + salt[:, 0]
        return wire

    def decode(self, wire: Tensor, record_bytes: int) -> Tensor:
        wire = wire.clone()
        words = wire.view(torch.int64)
        watched = self._watched(words)
        watched.copy_(watched ^ words[:, :1])
        return wire[:, self.SALT : self.SALT + record_bytes]

    def arrived(self, wire: Tensor | None, epoch: int, payload: int | None, done: int) -> bool:
        assert wire is not None
        return bool((self._watched(wire.view(torch.int64)) != SENTINEL).all())

    def fill(self, wire: Tensor) -> None:
        pattern = torch.tensor(list(SENTINEL_BYTES), dtype=torch.uint8, device=wire.device)
        wire.copy_(pattern.repeat(wire.numel() // len(SENTINEL_BYTES)).view_as(wire))


Codec = WordCodec


def make_codec(signalling: Signalling, atomic_block: int) -> Codec:
    """The codec of a signalling mode on blocks of `atomic_block` bytes."""
    if signalling == "fused":
        return FusedCodec(atomic_block)
    if signalling == "sentinel":
        return SentinelCodec(atomic_block)
    return ChecksumCodec() if signalling == "checksum" else WordCodec()
