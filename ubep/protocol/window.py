"""The layout of one rank's window: the same on every rank, so an offset is valid everywhere.

A window holds two parities; each holds, in this order:

    flags    for every source a header flag and its completion flags, one source to a stride
    headers  for every source one announcement: counts, or why it refused
    slots    for every source the records it sends            (staged; combine without `get`)
    rows     rows at their final place, or rows to be read    (direct)
    lists    which rows each peer is to read                  (direct with `get`)

All offsets are Python integers: nothing is truncated to 32 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ubep.protocol.flags import PARITIES
from ubep.protocol.records import align

FLAG_BYTES = 8
PAGE = 64


@dataclass(frozen=True)
class WindowLayout:
    """Sizes in bytes, from which every offset follows."""

    world_size: int
    flags_per_source: int
    flag_stride: int
    header_bytes: int
    slot_bytes: int  # of one source
    row_bytes: int  # of the whole rows region
    list_bytes: int  # of the whole lists region
    block: int = 1

    def _pad(self, nbytes: int) -> int:
        return align(nbytes, max(PAGE, self.block))

    @cached_property
    def _flag_block(self) -> int:
        return align(FLAG_BYTES * self.flags_per_source, self.flag_stride)

    @cached_property
    def _headers(self) -> int:
        return self._pad(self.world_size * self._flag_block)

    @cached_property
    def _slots(self) -> int:
        return self._headers + self._pad(self.world_size * self.header_bytes)

    @cached_property
    def _rows(self) -> int:
        return self._slots + self.world_size * self._slot_stride

    @cached_property
    def _lists(self) -> int:
        return self._rows + self._pad(self.row_bytes)

    @cached_property
    def parity_bytes(self) -> int:
        return self._lists + self._pad(self.list_bytes)

    @property
    def nbytes(self) -> int:
        """Size of one rank's window."""
        return PARITIES * self.parity_bytes

    def flag(self, parity: int, source: int, index: int) -> int:
        """Offset of a flag word; index 0 is the header's."""
        return parity * self.parity_bytes + source * self._flag_block + index * FLAG_BYTES

    def header(self, parity: int, source: int) -> int:
        return parity * self.parity_bytes + self._headers + source * self.header_bytes

    @cached_property
    def _slot_stride(self) -> int:
        return self._pad(self.slot_bytes)

    def slot(self, parity: int, source: int) -> int:
        """Offset of a source's first record."""
        return parity * self.parity_bytes + self._slots + source * self._slot_stride

    def rows(self, parity: int) -> int:
        return parity * self.parity_bytes + self._rows

    def lists(self, parity: int) -> int:
        return parity * self.parity_bytes + self._lists

    def flags(self, parity: int) -> slice:
        """All flag words of a parity."""
        return slice(parity * self.parity_bytes, parity * self.parity_bytes + self._headers)

    def data(self, parity: int) -> slice:
        """Everything of a parity but the flags."""
        return slice(parity * self.parity_bytes + self._headers, (parity + 1) * self.parity_bytes)
