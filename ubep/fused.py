"""Native dispatch and combine beside the driver: what a plugin implements, and what the core makes of it.

A fused executor carries out the same plan as the driver: same windows, announcements, flags, chunks and
order. So ranks may mix the two, and every refusal, deadline and failure reads the same: the texts are
made here, by the operation's own code, from the announcements that lie in the window.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from ubep.driver import Driver
from ubep.errors import DeadlineError, PeerFailureError, UbepError
from ubep.handle import Handle, Received
from ubep.protocol import actions as act
from ubep.protocol.combine import Combine
from ubep.protocol.dispatch import Dispatch, ReceivedRecords
from ubep.protocol.flags import next_epoch
from ubep.protocol.header import combine_tag, dispatch_tag
from ubep.protocol.operation import Operation
from ubep.protocol.plan import Plan
from ubep.protocol.routing import RowLayout, SentRecords

if TYPE_CHECKING:
    from ubep.expert_parallel import ExpertParallel, _Lane


class Stopped(Protocol):
    """A fused operation that ended without a result.

    kind: "ended": all ranks alike, as their announcements say; "deadline"; "failed": `peer` did;
        "corrupt": a record of `peer` made no sense.
    waiting: the rank that was waited for.  heard: ranks whose announcement lies in the window.
    placed: records of each source.
    """

    kind: Literal["ended", "deadline", "failed", "corrupt"]
    waiting: int
    peer: int
    heard: list[int]
    placed: list[int]


class FusedRouting(Protocol):
    """The routing of one dispatch in native memory; everything but num_rows is made on demand.

    sent, received: the fields of SentRecords (without slot_valid) and ReceivedRecords (the layout's as
    offset, first and count), by name.
    """

    num_rows: int

    def sent(self) -> dict[str, Any]: ...
    def received(self) -> dict[str, Any]: ...
    def row_weights(self) -> Tensor: ...
    def expert_counts(self) -> Tensor: ...


class Fused(Protocol):
    """One rank's native executor of a layer. None as a result: this input is for the core to judge."""

    def dispatch(
        self,
        lane: int,
        epoch: int,
        timeout_s: float,
        x: Tensor,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        previous: Any,
        tag: int,
        num_valid: int,
        keep_quantised: bool,
    ) -> tuple[Tensor, Tensor | None, FusedRouting] | Stopped | None:
        """previous: the routing to repeat.  num_valid: -1: all.  Kept fp8 rows come as bytes."""

    def combine(
        self,
        lane: int,
        epoch: int,
        timeout_s: float,
        y: Tensor,
        routing: FusedRouting,
        tag: int,
        weighted: bool,
        row_weights: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor] | Stopped | None:
        """The output; with row_weights also what comes back of them."""

    def input(self, lane: int, tokens: int) -> Tensor | None:
        """Memory for `tokens` rows that peers read in place, the same at every call; None: there is none."""

    def refuse(self, lane: int, epoch: int, timeout_s: float, is_dispatch: bool, reason: str) -> Stopped:
        """Take part in an operation only to refuse it."""


class FusedHandle(Handle):
    """A handle whose routing stays in native memory until somebody looks at it."""

    def __init__(
        self, generation: int, lane: int, epoch: int, plan: Plan, rank: int, routing: FusedRouting
    ) -> None:
        self.generation = generation
        self.lane = lane
        self.epoch = epoch
        self.plan = plan
        self.rank = rank
        self.routing = routing

    @property
    def num_rows(self) -> int:
        return self.routing.num_rows

    @cached_property
    def sent(self) -> SentRecords:  # type: ignore[override]
        fields = self.routing.sent()
        valid = torch.zeros(fields["num_tokens"] * self.plan.workload.topk, dtype=torch.bool)
        valid[fields["slot"]] = True
        return SentRecords(slot_valid=valid.view(-1, self.plan.workload.topk), **fields)

    @cached_property
    def received(self) -> ReceivedRecords:  # type: ignore[override]
        fields = self.routing.received()
        layout = RowLayout(fields.pop("offset"), fields.pop("first"), fields.pop("count"))
        return ReceivedRecords(layout=layout, **fields)


class FusedReceived(Received):
    """The result of a fused dispatch; what is not asked for is not made."""

    def __init__(self, x: Tensor, scales: Tensor | None, handle: FusedHandle) -> None:
        self.x = x
        self.scales = scales
        self.handle = handle

    @cached_property
    def weights(self) -> Tensor:  # type: ignore[override]
        routing: FusedRouting = self.handle.routing  # type: ignore[attr-defined]
        return routing.row_weights()

    @cached_property
    def expert_counts(self) -> Tensor:
        handle = self.handle
        if handle.plan.per_rank:
            return super().expert_counts
        counts: Tensor = handle.routing.expert_counts()  # type: ignore[attr-defined]
        return counts


def dispatch(
    layer: ExpertParallel,
    x: Tensor,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    handle: Handle | None,
    num_valid: int | None,
    keep_quantised: bool,
    lane: int,
) -> Received | None:
    """A dispatch by the layer's fused executor; None where the driver must do it."""
    state = layer._lane(lane)
    fused, epoch = layer._fused, state.epoch
    assert fused is not None
    previous, tag, result = None, 0, None
    if handle is not None:
        if not isinstance(handle, FusedHandle):
            return None
        previous, tag = handle.routing, dispatch_tag(handle.epoch)
    timeout_s = layer._take_timeout()
    if handle is None or (
        topk_idx is None
        and topk_weights is None
        and num_valid is None
        and layer._stale(handle, handle.lane) is None
    ):
        valid = -1 if num_valid is None else num_valid if num_valid >= 0 else len(x) + 1
        try:
            result = fused.dispatch(
                lane, epoch, timeout_s, x, topk_idx, topk_weights, previous, tag, valid, keep_quantised
            )
        except BaseException as broken:
            layer._give_up("dispatch", epoch, broken)
            raise
    if type(result) is tuple:
        state.epoch = next_epoch(epoch)
        rows, scales, routing = result
        if scales is not None and layer.plan.workload.quantise == "fp8":
            rows = rows.view(torch.float8_e4m3fn)
        elif scales is not None:
            rows = rows.view(torch.int8)
        return FusedReceived(
            rows, scales, FusedHandle(layer.generation, lane, epoch, layer.plan, layer.rank, routing)
        )
    error = None
    if result is None:
        error = layer._refuse_dispatch(x, topk_idx, topk_weights, handle, num_valid)
        if error is None:
            layer._next_timeout_s = timeout_s
            plain = [
                t if t is None or t.is_contiguous() else t.contiguous() for t in (x, topk_idx, topk_weights)
            ]
            if all(a is b for a, b in zip(plain, (x, topk_idx, topk_weights), strict=True)):
                return None
            assert plain[0] is not None
            return dispatch(layer, plain[0], plain[1], plain[2], handle, num_valid, keep_quantised, lane)
    op = Dispatch(layer._view, epoch, lane, x, None, tag=tag, error=error)
    _conclude(layer, state, op, result, timeout_s)  # type: ignore[arg-type]
    return None


def combine(
    layer: ExpertParallel,
    y: Tensor,
    handle: Handle,
    lane: int,
    weighted: bool,
    row_weights: Tensor | None,
) -> tuple[Tensor, Tensor | None] | None:
    """A combine by the layer's fused executor; None where the driver must do it."""
    if not isinstance(handle, FusedHandle):
        return None
    state = layer._lane(lane)
    fused, epoch = layer._fused, state.epoch
    assert fused is not None
    result = None
    timeout_s = layer._take_timeout()
    if layer._stale(handle, lane) is None:
        try:
            result = fused.combine(
                lane, epoch, timeout_s, y, handle.routing, combine_tag(handle.epoch), weighted, row_weights
            )
        except BaseException as broken:
            layer._give_up("combine", epoch, broken)
            raise
    if isinstance(result, Tensor):
        state.epoch = next_epoch(epoch)
        return result, None
    if type(result) is tuple:
        state.epoch = next_epoch(epoch)
        return result
    error = None
    if result is None:
        error = layer._refuse_combine(y, handle, lane, row_weights)
        if error is None:
            layer._next_timeout_s = timeout_s
            plain = [t if t is None or t.is_contiguous() else t.contiguous() for t in (y, row_weights)]
            if plain[0] is y and plain[1] is row_weights:
                return None
            assert plain[0] is not None
            return combine(layer, plain[0], handle, lane, weighted, plain[1])
    sent, received, tag = handle.sent, handle.received, handle.epoch
    op = Combine(layer._view, epoch, lane, y, sent, received, handle_epoch=tag, error=error)
    _conclude(layer, state, op, result, timeout_s)  # type: ignore[arg-type]
    return None


def _conclude(
    layer: ExpertParallel, state: _Lane, op: Operation, stopped: Stopped | None, timeout_s: float
) -> None:
    """Raise what an operation without a result has to say; refuse it first where nobody has yet."""
    fused = layer._fused
    assert fused is not None
    if stopped is None:
        reason = f"{op.name}: {op.own_refusal}"
        stopped = fused.refuse(op.lane, op.epoch, timeout_s, op.name == "dispatch", reason)
    state.epoch = next_epoch(op.epoch)
    size = layer.plan.header_bytes
    for source in stopped.heard:
        offset = layer.plan.layout.header(op.parity, source)
        op.hear(source, state.window.local[offset : offset + size].view(1, size))
    if stopped.kind == "ended":
        op.settle()
        assert op.error is not None
        raise op.error
    op.placed[:] = stopped.placed
    error = _failure(layer, state, op, stopped, timeout_s)
    layer._give_up(op.name, op.epoch, error)
    raise error


def _failure(
    layer: ExpertParallel, state: _Lane, op: Operation, stopped: Stopped, timeout_s: float
) -> UbepError:
    driver = Driver(layer._fabric, state.window, op)
    where = driver.describe(act.Wait(stopped.waiting, None, 0, 0, 0, 0))
    if stopped.kind == "failed":
        reason = layer._fabric.failure(stopped.peer) or "it has closed its communicator"
        return PeerFailureError(f"rank {stopped.peer} failed: {reason}; {where}")
    if stopped.kind == "corrupt":
        return UbepError(f"rank {stopped.peer} sent a record that makes no sense; {where}")
    return DeadlineError(f"no answer within {timeout_s:g} s: {where}")
