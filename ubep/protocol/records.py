"""The records that travel: one row with its scales and its metadata, as bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ubep.protocol.quantise import num_scales
from ubep.workload import Workload

RECORD_ALIGN = 16
META_ALIGN = 4


def align(value: int, multiple: int) -> int:
    """`value` rounded up to a multiple."""
    return -(-value // multiple) * multiple


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous [n, columns] tensor of any dtype as uint8 [n, bytes], without a copy."""
    return tensor.contiguous().view(torch.uint8)


@dataclass(frozen=True)
class RecordFormat:
    """Byte layout of one record: row, float32 scales, int32 metadata words, padding to 16 bytes."""

    row_bytes: int
    scales: int
    meta_words: int

    @cached_property
    def scale_offset(self) -> int:
        return align(self.row_bytes, META_ALIGN)

    @cached_property
    def meta_offset(self) -> int:
        return self.scale_offset + 4 * self.scales

    @cached_property
    def nbytes(self) -> int:
        return align(self.meta_offset + 4 * self.meta_words, RECORD_ALIGN)

    def join(self, rows: Tensor, scales: Tensor | None, meta: Tensor) -> Tensor:
        """Rows [n, H], scales float32 [n, scales], 4-byte metadata [n, meta_words] -> uint8 [n, nbytes]."""
        n = rows.shape[0]
        parts = [as_bytes(rows)]
        if self.scale_offset > self.row_bytes:
            parts.append(rows.new_zeros(n, self.scale_offset - self.row_bytes, dtype=torch.uint8))
        if scales is not None:
            parts.append(as_bytes(scales))
        if self.meta_words:
            parts.append(as_bytes(meta).to(rows.device))
        tail = self.nbytes - self.meta_offset - 4 * self.meta_words
        if tail:
            parts.append(rows.new_zeros(n, tail, dtype=torch.uint8))
        return torch.cat(parts, 1)

    def rows(self, records: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows [n, H] of uint8 records [n, nbytes]."""
        return records[:, : self.row_bytes].contiguous().view(dtype)

    def scale(self, records: Tensor) -> Tensor:
        """The scales, float32 [n, scales]."""
        return records[:, self.scale_offset : self.meta_offset].contiguous().view(torch.float32)

    def meta(self, records: Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
        """The metadata words, [n, meta_words]."""
        end = self.meta_offset + 4 * self.meta_words
        return records[:, self.meta_offset : end].contiguous().view(dtype).cpu()


def meta_words(entries: int) -> int:
    """Words of a dispatch record's metadata: token, then expert, position and weight of each entry."""
    return 1 + 3 * entries


def dispatch_format(workload: Workload, entries: int) -> RecordFormat:
    """A dispatched record: the (quantised) row, its scales, and `entries` experts it is meant for."""
    itemsize = workload.torch_dtype.itemsize if workload.quantise == "none" else 1
    scales = num_scales(workload.quantise, workload.hidden)
    return RecordFormat(workload.hidden * itemsize, scales, meta_words(entries))


def combine_format(workload: Workload, entries: int) -> RecordFormat:
    """A returned record: the row, and one float32 for each entry (see `row_weights` of combine)."""
    return RecordFormat(workload.hidden * workload.torch_dtype.itemsize, 0, entries)
