"""The announcement that every rank makes to every peer in every operation: counts, or a refusal.

int32 words: status, records, base, tag, the inner slice edges of the sending workers, then row counts;
in a refusal the reason in UTF-8 stands in place of all that follows the status.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

OK, REFUSED = 0, 1
HEADER_WORDS = 4  # status, records, base, tag
COMBINE_TAG = 1 << 30


@dataclass(frozen=True)
class Header:
    """records: that will follow.  base: the first of them in this source's lists (direct).

    tag: which operation this is; it differs where ranks call in different orders or mix up handles.
    bounds: records before each edge of the sending workers' slices.  counts: rows by group.
    """

    records: int = 0
    base: int = 0
    tag: int = 0
    bounds: Sequence[int] = ()
    counts: Tensor | None = None
    refusal: str | None = None


def dispatch_tag(handle_epoch: int = 0) -> int:
    """Tag of a dispatch: 0, or the epoch of the handle whose routing it repeats."""
    return handle_epoch & (COMBINE_TAG - 1)


def combine_tag(handle_epoch: int) -> int:
    """Tag of the combine that answers the dispatch of `handle_epoch`."""
    return COMBINE_TAG | dispatch_tag(handle_epoch)


def describe_tag(tag: int) -> str:
    epoch = tag & (COMBINE_TAG - 1)
    if tag & COMBINE_TAG:
        return f"combine of the dispatch of epoch {epoch}"
    return f"dispatch that repeats epoch {epoch}" if epoch else "dispatch"


def encode(header: Header, nbytes: int) -> Tensor:
    """The header as one record, uint8 [1, nbytes]."""
    if header.refusal is not None:
        text = header.refusal.encode()[: nbytes - 4].ljust(nbytes - 4, b"\0")
        return torch.tensor([*REFUSED.to_bytes(4, "little"), *text], dtype=torch.uint8)[None]
    words = [OK, header.records, header.base, header.tag, *header.bounds[1:-1]]
    if header.counts is not None:
        words += header.counts.tolist()
    words += [0] * (nbytes // 4 - len(words))
    return torch.tensor(words, dtype=torch.int32).view(torch.uint8)[None]


def decode(record: Tensor, slices: int, counts: int) -> Header:
    """The inverse, for `slices` sending workers and `counts` row counts."""
    words: list[int] = record.contiguous().view(torch.int32).view(-1).tolist()
    if words[0] == REFUSED:
        text = bytes(record.view(-1)[4:].tolist()).rstrip(b"\0").decode(errors="ignore")
        return Header(refusal=text)
    _, records, base, tag, *inner = words[: HEADER_WORDS + slices - 1]
    return Header(
        records=records,
        base=base,
        tag=tag,
        bounds=[0, *inner, records],
        counts=torch.tensor(words[HEADER_WORDS + slices - 1 :][:counts], dtype=torch.int64),
    )
