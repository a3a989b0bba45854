"""Codecs: what is put on the wire comes back, and is not believed before all of it is there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ubep.protocol.header import Header, combine_tag, decode, describe_tag, dispatch_tag, encode
from ubep.protocol.signalling import FusedCodec, SentinelCodec, checksum, make_codec

MODES = ["word", "fused", "sentinel", "checksum"]
BLOCKS = [8, 128, 512]


@given(
    st.sampled_from(MODES),
    st.sampled_from(BLOCKS),
    st.integers(1, 3),
    st.integers(1, 40),
    st.binary(min_size=1, max_size=64),
    st.integers(1, 2**32 - 1),
)
def test_decode_inverts_encode(mode: str, block: int, n: int, units: int, data: bytes, epoch: int) -> None:
    codec = make_codec(mode, block)
    size = 16 * units
    records = torch.tensor(list((data * (n * size))[: n * size]), dtype=torch.uint8).view(n, size)
    wire = codec.encode(records, epoch)
    assert wire.shape == (n, codec.wire_bytes(size))
    assert torch.equal(codec.decode(wire, size), records)
    payload = codec.payload(wire, n) if codec.flagged else None
    assert codec.arrived(wire, epoch, payload, n)


@pytest.mark.parametrize("mode", ["fused", "sentinel"])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_record_counts_only_when_every_block_is_there(mode: str, block: int) -> None:
    codec = make_codec(mode, block)
    wire = codec.encode(torch.arange(1040).to(torch.uint8)[None], 7)
    for missing in range(0, wire.shape[1], block):
        window = torch.zeros_like(wire)
        codec.fill(window)
        before = window[:, missing : missing + block].clone()
        window.copy_(wire)
        window[:, missing : missing + block] = before
        assert not codec.arrived(window, 7, None, 1)


def test_fused_blocks_of_another_epoch_do_not_count() -> None:
    codec = FusedCodec(128)
    wire = codec.encode(torch.ones(1, 480, dtype=torch.uint8), 7)
    assert not codec.arrived(wire, 9, None, 1)
    assert codec.arrived(codec.encode(torch.ones(1, 480, dtype=torch.uint8), 2**32 - 1), 2**32 - 1, None, 1)


def test_fused_overheads_are_those_of_the_paper_and_of_nccl() -> None:
    assert (FusedCodec(512).data, FusedCodec(128).data, FusedCodec(8).data) == (480, 120, 4)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_payload_full_of_the_pattern_is_escaped(block: int) -> None:
    codec = SentinelCodec(block)
    window = torch.zeros(2, codec.wire_bytes(1024), dtype=torch.uint8)
    codec.fill(window)
    records = window[:, :1024].clone()
    wire = codec.encode(records, 1)
    assert codec.arrived(wire, 1, None, 2)
    assert torch.equal(codec.decode(wire, 1024), records)


def test_the_checksum_notices_any_changed_byte() -> None:
    data = torch.arange(64).to(torch.uint8)
    for at in range(64):
        changed = data.clone()
        changed[at] ^= 1
        assert checksum(changed) != checksum(data)


@given(
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**31 - 1),
    st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=5),
    st.lists(st.integers(0, 2**31 - 1), max_size=8),
)
def test_announcements_come_back(base: int, epoch: int, edges: list[int], counts: list[int]) -> None:
    bounds = [0, *sorted(edges)]
    head = Header(bounds[-1], base, combine_tag(epoch), bounds, torch.tensor(counts, dtype=torch.int64))
    back = decode(encode(head, 256), len(bounds) - 1, len(counts))
    assert (back.records, back.base, back.tag, list(back.bounds)) == (bounds[-1], base, head.tag, bounds)
    assert back.counts is not None
    assert back.counts.tolist() == counts


def test_refusals_come_back_and_long_ones_are_cut() -> None:
    assert decode(encode(Header(refusal="T is 5, limit 4"), 256), 1, 4).refusal == "T is 5, limit 4"
    assert decode(encode(Header(refusal="ü" * 500), 256), 1, 4).refusal == "ü" * 126


def test_tags_tell_operations_apart() -> None:
    assert describe_tag(dispatch_tag()) == "dispatch"
    assert describe_tag(dispatch_tag(5)) == "dispatch that repeats epoch 5"
    assert describe_tag(combine_tag(5)) == "combine of the dispatch of epoch 5"
