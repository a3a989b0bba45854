"""Mistakes that an implementer of the protocol could make, each planted on purpose.

A fault is a change to the code (through monkeypatch) or a transport that breaks its word, and the check
of the suite that must notice it. `test_checks` runs every check as it is, `test_planted_faults` with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests import checks
from ubep.capabilities import Capabilities
from ubep.expert_parallel import ExpertParallel
from ubep.protocol import actions as act
from ubep.protocol import (
    combine,
    dispatch,
    flags,
    header,
    operation,
    routing,
    signalling,
    streams,
    window,
)
from ubep_backends.reference.world import MemoryModel

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Fault:
    """A planted mistake and the check that must notice it."""

    name: str
    plant: Callable[[Patch], None]
    check: Callable[[], None]
    found_by: str


def _survey(seeds: int = checks.SEEDS, **changes: Any) -> Callable[[], None]:
    return lambda: checks.survey(replace(checks.BUSY, **changes), seeds)


# ---- order and visibility


def no_fence(patch: Patch) -> None:
    """The transport shows a signal before the puts in front of it, though it declares `release`."""
    patch.setattr(checks, "TRANSPORT", MemoryModel(release=False))


def reordered_signals(patch: Patch) -> None:
    """The transport reorders signals, though it declares `ordered`: one progress word for all chunks."""
    patch.setattr(checks, "TRANSPORT", MemoryModel(ordered=False))


def torn_blocks(patch: Patch) -> None:
    """Fused signalling on a transport without atomic blocks."""
    patch.setattr(checks, "TRANSPORT", MemoryModel(atomic_block=1))


def flag_before_data(patch: Patch) -> None:
    """Every signal goes out before the put that it announces."""

    def swapped(stream: act.Stream) -> act.Stream:
        held, answer = None, None
        while True:
            try:
                action = stream.send(answer)
            except StopIteration:
                return
            answer = None
            if isinstance(action, act.Put):
                held = action
            else:
                answer = yield action
                if held is not None and isinstance(action, act.Signal):
                    yield held
                    held = None

    def lazily(stream: Callable[..., act.Stream]) -> Callable[..., act.Stream]:
        return lambda *args: swapped(stream(*args))

    patch.setattr(streams, "_send", lazily(streams._send))


def announced_before_published(patch: Patch) -> None:
    """A worker announces before another one has laid out the rows that peers will read."""
    original = streams._worker

    def hasty(op: Any, worker: int, published: act.Event, *rest: Any) -> act.Stream:
        published.is_set = True
        return original(op, worker, published, *rest)

    patch.setattr(streams, "_worker", hasty)


def torn_block_accepted(patch: Patch) -> None:
    """A fused record counts as complete when its first block is."""
    original = signalling.FusedCodec.arrived

    def first_block(self: Any, wire: Any, epoch: int, payload: Any, done: int) -> bool:
        return original(self, wire[:, : self.block], epoch, payload, done)

    patch.setattr(signalling.FusedCodec, "arrived", first_block)


# ---- epochs and reuse


class AnyEpoch(int):
    """Equal to every epoch."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


def epoch_ignored(patch: Patch) -> None:
    """A flag counts whatever its epoch."""
    patch.setattr("ubep.driver.unpack_word", lambda word: (AnyEpoch(), flags.unpack_word(word)[1]))


def one_parity(patch: Patch) -> None:
    """One copy of the window instead of two."""
    patch.setattr(operation, "parity", lambda epoch: 0)


def nothing_cleared_at_the_wrap(patch: Patch) -> None:
    """Words from one wrap ago stay."""
    patch.setattr("ubep.driver.clears_other_parity", lambda epoch: False)


def sentinel_not_restored(patch: Patch) -> None:
    """The receiver does not put the pattern back after use."""
    original, seen = signalling.SentinelCodec.fill, set()

    def once(self: Any, wire: Any) -> None:
        if wire.dim() == 1:  # the whole window, before first use
            original(self, wire)
        seen.add(id(self))

    patch.setattr(signalling.SentinelCodec, "fill", once)


# ---- announcements, slots, counts


def silent_when_empty(patch: Patch) -> None:
    """A rank announces itself only to peers to which it sends something."""
    original = streams._announce
    patch.setattr(
        streams, "_announce", lambda op, peers: original(op, [p for p in peers if op.outgoing(p)[-1]])
    )


def wrong_slot(patch: Patch) -> None:
    """Rows go to the slots of the next source."""
    original = operation.Operation.targets

    def shifted(self: Any, peer: int, lo: int, hi: int) -> Any:
        stride = self.plan.layout._slot_stride
        wrapped = -self.rank if self.rank == self.plan.world_size - 1 else 1
        return [(offset + wrapped * stride, a, b) for offset, a, b in original(self, peer, lo, hi)]

    patch.setattr(operation.Operation, "targets", shifted)


def one_record_short(patch: Patch) -> None:
    """Announcements count one record less than is sent."""
    original = header.encode
    patch.setattr(
        header,
        "encode",
        lambda head, size: original(replace(head, records=max(0, head.records - 1)), size),
    )


def lost_tail(patch: Patch) -> None:
    """The last, partial chunk is not sent."""
    original = streams._chunks

    def whole_chunks(op: Any, bounds: Any, chunk: int, sender: int) -> Iterator[tuple[int, int, int]]:
        return (c for c in original(op, bounds, chunk, sender) if c[2] - c[1] == chunk)

    patch.setattr(streams, "_chunks", whole_chunks)


def ordered_waits(patch: Patch) -> None:
    """A rank announces itself only after it has heard the next one."""
    original = streams._announce

    def after_next(op: Any, peers: list[int]) -> act.Stream:
        following = (op.rank + 1) % op.plan.world_size
        flag = op.plan.layout.flag(op.parity, following, 0)
        yield act.Wait(following, flag, 1, 0, 0, 16)
        yield from original(op, peers)

    patch.setattr(streams, "_announce", after_next)


def narrow_offsets(patch: Patch) -> None:
    """Offsets are kept in 32 bits."""
    original = window.WindowLayout.slot
    patch.setattr(
        window.WindowLayout, "slot", lambda self, parity, source: original(self, parity, source) & 0x7FFFFFFF
    )


# ---- rows, weights, ids


def weights_twice(patch: Patch) -> None:
    """Weights are applied by the expert's rank and by the source."""
    original = combine.reduce_rows
    patch.setattr(
        combine,
        "reduce_rows",
        lambda rows, w, valid, dtype: original(rows, None if w is None else w * w, valid, dtype),
    )


def global_ids(patch: Patch) -> None:
    """Expert ids are left global in the records."""
    original = routing.route

    def unmapped(view: Any, idx: torch.Tensor, weights: torch.Tensor) -> Any:
        sent = original(view, idx, weights)
        shift = view.plan.local_experts
        first = torch.repeat_interleave(
            torch.tensor([min(e, default=0) for e in shift]), torch.tensor(sent.start).diff()
        )
        return replace(sent, expert=torch.where(sent.expert >= 0, sent.expert + first[:, None], -1))

    patch.setattr("ubep.expert_parallel.route", unmapped)


def sum_in_storage_dtype(patch: Patch) -> None:
    """The sum is rounded to the dtype of the rows after every term."""

    def rounded(rows: Any, weights: Any, valid: Any, dtype: torch.dtype) -> torch.Tensor:
        acc = torch.zeros(rows.shape[0], rows.shape[2], dtype=dtype)
        for j in range(rows.shape[1]):
            weight = 1.0 if weights is None else weights[:, j, None]
            acc = torch.where(valid[:, j, None], (acc + rows[:, j].float() * weight).to(dtype), acc)
        return acc

    patch.setattr(combine, "reduce_rows", rounded)


def summed_backwards(patch: Patch) -> None:
    """Rows are summed in descending k."""
    original = combine.reduce_rows
    patch.setattr(
        combine,
        "reduce_rows",
        lambda rows, w, valid, dtype: original(
            rows.flip(1), None if w is None else w.flip(1), valid.flip(1), dtype
        ),
    )


def gaps_not_zeroed(patch: Patch) -> None:
    """Rows between aligned experts keep what was in memory."""

    def leave(self: dispatch.Dispatch) -> None:
        self.rows[-1] = 7.0

    patch.setattr(dispatch.Dispatch, "finish", leave)


def sentinel_in_payload(patch: Patch) -> None:
    """A payload that holds the reserved pattern is sent as it is."""
    patch.setattr(
        signalling.SentinelCodec,
        "_watched",
        lambda self, words: words[:, self.block // 8 - 1 :: self.block // 8],
    )
    patch.setattr(
        signalling.SentinelCodec,
        "encode",
        lambda self, records, epoch: torch.nn.functional.pad(
            records, (8, self.wire_bytes(records.shape[1]) - records.shape[1] - 8)
        ),
    )


# ---- what must be refused


def stale_handle(patch: Patch) -> None:
    """Handles of other layers and lanes are accepted."""
    patch.setattr(ExpertParallel, "_stale", lambda self, handle, lane: None)


def unsound_mode(patch: Patch) -> None:
    """Every signalling mode is planned, whatever the transport declares."""
    patch.setattr(Capabilities, "signalling", lambda self: ("word", "fused", "sentinel", "checksum"))


def refusal_kept_private(patch: Patch) -> None:
    """A rank that refuses its input tells nobody."""

    def silent(op: Any, peers: list[int]) -> act.Stream:
        if op.own_refusal is None:
            yield from original(op, peers)

    original = streams._announce
    patch.setattr(streams, "_announce", silent)


BUSY = checks.BUSY
SURVEYS: dict[str, Callable[[], None]] = {
    "word": _survey(options=replace(BUSY.options, signalling="word")),
    "word, chunks that do not divide": _survey(options=replace(BUSY.options, chunk_records=3)),
    "word, ranks without tokens": _survey(tokens=(4, 0, 2)),
    "fused": _survey(
        options=replace(BUSY.options, signalling="fused"), model=MemoryModel(atomic_block=32), hidden=24
    ),
    "sentinel": _survey(options=replace(BUSY.options, signalling="sentinel")),
    # Many experts and few tokens: two of four workers announce, so one may do so before rows are published.
    "direct, several announcing workers": _survey(
        seeds=200,
        num_experts=9,
        topk=1,
        max_tokens=1,
        tokens=(1,),
        options=replace(BUSY.options, placement="direct", workers=4),
    ),
    # Rounds 0 and 1 write every word, in epochs 1 to 4. One wrap later round 2 is empty, and round 3
    # comes in epoch 3 again: words of round 1 must not count.
    "wrap": _survey(jump=(2, flags.EPOCHS - 1), rounds=4, tokens=(6,) * 6 + (0,) * 3 + (6,) * 3),
}

CORE = "the core property (survey of seeds)"
FAULTS = [
    Fault("missing fence", no_fence, SURVEYS["word"], CORE),
    Fault("signals reordered on one word", reordered_signals, SURVEYS["word"], CORE),
    Fault("fused mode without an atomic block", torn_blocks, SURVEYS["fused"], CORE),
    Fault("torn fused block accepted", torn_block_accepted, SURVEYS["fused"], CORE),
    Fault(
        "announced before published",
        announced_before_published,
        SURVEYS["direct, several announcing workers"],
        CORE,
    ),
    Fault("flag before data", flag_before_data, SURVEYS["word"], CORE),
    Fault("epoch not checked", epoch_ignored, SURVEYS["word"], CORE),
    Fault("one parity instead of two", one_parity, SURVEYS["word"], CORE),
    Fault("nothing cleared at the wrap", nothing_cleared_at_the_wrap, SURVEYS["wrap"], "the wrap property"),
    Fault("sentinel not restored", sentinel_not_restored, SURVEYS["sentinel"], CORE),
    Fault(
        "no flag for an empty peer",
        silent_when_empty,
        SURVEYS["word, ranks without tokens"],
        "deadlock in the core property",
    ),
    Fault("wrong slot", wrong_slot, SURVEYS["word"], CORE),
    Fault("count off by one", one_record_short, SURVEYS["word"], CORE),
    Fault("last partial chunk lost", lost_tail, SURVEYS["word, chunks that do not divide"], CORE),
    Fault("deadlock by ordered waits", ordered_waits, SURVEYS["word"], "deadlock in the core property"),
    Fault("int32 offset", narrow_offsets, checks.offsets_are_64_bit, "offsets_are_64_bit"),
    Fault("weights applied twice", weights_twice, SURVEYS["word"], CORE),
    Fault("ids left global", global_ids, SURVEYS["word"], CORE),
    Fault("sum rounded to the storage dtype", sum_in_storage_dtype, checks.sum_is_float32, "sum_is_float32"),
    Fault("sum in another order", summed_backwards, checks.sum_is_in_ascending_k, "sum_is_in_ascending_k"),
    Fault("gaps not zeroed", gaps_not_zeroed, checks.gaps_are_zero, "gaps_are_zero"),
    Fault("sentinel in the payload", sentinel_in_payload, checks.any_payload_passes, "any_payload_passes"),
    Fault(
        "stale handle accepted", stale_handle, checks.stale_handles_are_refused, "stale_handles_are_refused"
    ),
    Fault(
        "mode used without its capability",
        unsound_mode,
        checks.unsound_modes_are_refused,
        "unsound_modes_are_refused",
    ),
    Fault(
        "refusal not told to peers",
        refusal_kept_private,
        checks.refusals_reach_every_rank,
        "refusals_reach_every_rank",
    ),
]
