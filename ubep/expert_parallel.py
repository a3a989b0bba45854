"""One expert-parallel layer: dispatch and combine on the lanes of its windows."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ubep import autograd, fused
from ubep.backend import Fabric, Window
from ubep.config import Config
from ubep.driver import Blocked, Driver, run
from ubep.errors import ClosedError, InvalidInputError, StaleHandleError, UbepError
from ubep.handle import Handle, Received, row_weights
from ubep.protocol.combine import Combine
from ubep.protocol.dispatch import Dispatch
from ubep.protocol.flags import FIRST_EPOCH, PARITIES, next_epoch
from ubep.protocol.header import dispatch_tag
from ubep.protocol.operation import Operation
from ubep.protocol.plan import Plan, RankPlan
from ubep.protocol.routing import SentRecords, route
from ubep.trace import Tracer

T = TypeVar("T")
_generations = itertools.count(1)


@dataclass
class _Lane:
    window: Window
    epoch: int = FIRST_EPOCH


class ExpertParallel:
    """Made by `Communicator.expert_parallel`. Every rank must call its operations in the same order.

    plan: what was agreed on, with the reason of each automatic choice in `plan.decisions`.
    tracer: set one to record every action.
    """

    def __init__(self, fabric: Fabric, plan: Plan, rank: int, config: Config) -> None:
        self.plan = plan
        self.rank = rank
        self.tracer: Tracer | None = None
        self.generation = next(_generations)
        self._view = RankPlan(plan, rank)
        self._fabric = fabric
        self._timeout_s = config.timeout_s
        self._next_timeout_s = config.first_timeout_s
        self._lanes = [_Lane(self._window()) for _ in range(plan.lanes)]
        self._unusable: str | None = None
        self._fused: fused.Fused | None = None
        if config.fused and plan.signalling == "word":
            self._fused = fabric.fuse(plan, [lane.window for lane in self._lanes])

    def _window(self) -> Window:
        window = self._fabric.allocate(self.plan.layout.nbytes)
        for parity in range(PARITIES):
            self.plan.codec.fill(window.local[self.plan.layout.data(parity)])
        return window

    @property
    def local_experts(self) -> list[int]:
        """Ids of the experts that this rank holds, in local order."""
        return list(self.plan.local_experts[self.rank])

    @property
    def num_local_experts(self) -> int:
        return len(self.local_experts)

    def input_buffer(self, tokens: int, lane: int = 0) -> Tensor:
        """[tokens, hidden] to be filled and dispatched; spares a copy where peers can read it in place.

        There is one such buffer for each lane. It must not be written while an operation that follows
        its dispatch on that lane, the combine as a rule, has not returned.
        """
        w = self.plan.workload
        if not 0 <= tokens <= w.max_tokens:
            raise InvalidInputError(f"a buffer for {tokens} tokens, max_tokens is {w.max_tokens}")
        self._lane(lane)
        buffer = self._fused.input(lane, tokens) if self._fused is not None else None
        return torch.empty(tokens, w.hidden, dtype=w.torch_dtype) if buffer is None else buffer

    # ---- operations

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        handle: Handle | None = None,
        num_valid: int | None = None,
        keep_quantised: bool = False,
        lane: int = 0,
    ) -> Received:
        """Send each token to its experts; returns the rows for this rank's experts. Collective.

        x [T, H] of the layer's dtype, 0 <= T <= max_tokens, T may differ by rank.
        topk_idx int64 or int32 [T, K]: expert ids, -1: none.  topk_weights float32 [T, K] (default: 1).
        handle: instead of these two, repeat the routing of an earlier dispatch of this layer.
        num_valid: tokens from this index on are padding and are ignored, whatever their ids.
        keep_quantised: leave rows as they travelled, with their scales.
        Differentiable in x and topk_weights.
        Raises InvalidInputError here, and PeerRefusedError on every other rank, for bad input; the layer
        stays usable. Raises DeadlineError or PeerFailureError, after which the layer is closed.
        """
        if autograd.wanted(x, topk_weights):
            return autograd.dispatch(self, x, topk_idx, topk_weights, handle, num_valid, lane)
        return self.dispatch_now(x, topk_idx, topk_weights, handle, num_valid, keep_quantised, lane)

    def combine(
        self, y: Tensor, handle: Handle, *, row_weights: Tensor | None = None, lane: int | None = None
    ) -> Any:
        """Return expert outputs to their tokens, summed in float32. Collective.

        y [N, H]: one row for each row of the dispatch. Returns [T, H]: sum_k w_k y_k ("weighted") or
        sum_k y_k ("sum"), in the order stated in `protocol.reduction`; tokens without experts get zeros.
        row_weights float32 [N] (token-rank: [N, K]): a number for each row that comes back as well;
        then returns ([T, H], float32 [T, K]).
        Differentiable in y and in the dispatch's topk_weights. Raises as dispatch, and StaleHandleError.
        """
        lane = handle.lane if lane is None else lane
        if row_weights is None and autograd.wanted(y, handle.weights):
            return autograd.combine(self, y, handle)
        out, back = self.combine_now(y, handle, lane, row_weights=row_weights)
        return out if row_weights is None else (out, back)

    def dispatch_now(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        handle: Handle | None = None,
        num_valid: int | None = None,
        keep_quantised: bool = False,
        lane: int = 0,
    ) -> Received:
        """dispatch without gradients: by fused kernels where the backend has them, else by the driver."""
        if self._fused is not None and self.tracer is None:
            received = fused.dispatch(
                self, x, topk_idx, topk_weights, handle, num_valid, keep_quantised, lane
            )
            if received is not None:
                return received
        return self.block(
            self.dispatch_steps(x, topk_idx, topk_weights, handle, num_valid, keep_quantised, lane)
        )

    def combine_now(
        self,
        y: Tensor,
        handle: Handle,
        lane: int,
        *,
        weighted: bool = True,
        row_weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """combine without gradients, as dispatch_now; returns also what came back of row_weights."""
        if self._fused is not None and self.tracer is None:
            result = fused.combine(self, y, handle, lane, weighted, row_weights)
            if result is not None:
                return result
        op = self.block(self.combine_steps(y, handle, lane, weighted=weighted, row_weights=row_weights))
        return op.out, op.weights

    def dispatch_steps(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        handle: Handle | None = None,
        num_valid: int | None = None,
        keep_quantised: bool = False,
        lane: int = 0,
    ) -> Generator[Blocked | None, None, Received]:
        """dispatch as a generator that yields between actions, for schedulers that interleave ranks."""
        state = self._lane(lane)
        sent, error = None, self._refuse_dispatch(x, topk_idx, topk_weights, handle, num_valid)
        if error is None:
            sent = handle.sent if handle else self._route(x, topk_idx, topk_weights, num_valid)
        op = Dispatch(
            self._view,
            state.epoch,
            lane,
            x,
            sent,
            tag=dispatch_tag(handle.epoch if handle else 0),
            keep_quantised=keep_quantised,
            error=error,
        )
        yield from self._carry_out(op, state)
        assert sent is not None
        result = Handle(self.generation, lane, op.epoch, self.plan, self.rank, sent, op.received)
        return Received(op.rows, op.scales, row_weights(self.plan, op.received).to(x.device), result)

    def combine_steps(
        self,
        y: Tensor,
        handle: Handle,
        lane: int,
        *,
        weighted: bool = True,
        row_weights: Tensor | None = None,
    ) -> Generator[Blocked | None, None, Combine]:
        """combine as a generator, as dispatch_steps; returns the finished operation."""
        state = self._lane(lane)
        op = Combine(
            self._view,
            state.epoch,
            lane,
            y,
            handle.sent,
            handle.received,
            handle_epoch=handle.epoch,
            weighted=weighted,
            row_weights=row_weights,
            error=self._refuse_combine(y, handle, lane, row_weights),
        )
        yield from self._carry_out(op, state)
        return op

    def _carry_out(self, op: Operation, state: _Lane) -> Iterator[Blocked | None]:
        state.epoch = next_epoch(state.epoch)
        try:
            yield from Driver(self._fabric, state.window, op, self.tracer).steps()
        except BaseException as error:
            self._give_up(op.name, op.epoch, error)
            raise
        if op.error is not None:
            raise op.error

    # ---- what is refused

    def _lane(self, lane: int) -> _Lane:
        if self._unusable is not None:
            raise ClosedError(f"this layer cannot be used: {self._unusable}")
        if not 0 <= lane < len(self._lanes):
            raise InvalidInputError(f"lane {lane} is not one of the {len(self._lanes)} lanes of this layer")
        return self._lanes[lane]

    def _refuse_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        handle: Handle | None,
        num_valid: int | None,
    ) -> UbepError | None:
        w = self.plan.workload
        problem = self._wrong_rows("x", x)
        if problem is None and len(x) > w.max_tokens:
            problem = f"x has {len(x)} tokens, max_tokens is {w.max_tokens}"
        if problem is None and num_valid is not None and not 0 <= num_valid <= len(x):
            problem = f"num_valid is {num_valid}, x has {len(x)} tokens"
        if problem is not None:
            return InvalidInputError(problem)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None or num_valid is not None:
                return InvalidInputError("give either a handle or topk_idx, topk_weights and num_valid")
            if handle.sent.num_tokens != len(x):
                return InvalidInputError(
                    f"x has {len(x)} tokens, the handle was made for {handle.sent.num_tokens}"
                )
            return self._stale(handle, handle.lane)
        problem = self._wrong_routing(len(x), topk_idx, topk_weights, num_valid)
        return None if problem is None else InvalidInputError(problem)

    def _wrong_rows(self, name: str, rows: Tensor) -> str | None:
        """What is wrong with a matrix of activations, or None."""
        w = self.plan.workload
        if not isinstance(rows, Tensor) or rows.dim() != 2 or rows.shape[1] != w.hidden:
            shape = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            return f"{name} is {shape}, must be [rows, {w.hidden}]"
        if rows.dtype != w.torch_dtype:
            return f"{name} has dtype {rows.dtype}, this layer was made for {w.torch_dtype}"
        return None

    def _wrong_routing(
        self, tokens: int, topk_idx: Tensor | None, topk_weights: Tensor | None, num_valid: int | None
    ) -> str | None:
        w = self.plan.workload
        shape = (tokens, w.topk)
        if topk_idx is None or tuple(topk_idx.shape) != shape:
            got = None if topk_idx is None else list(topk_idx.shape)
            return f"topk_idx is {got}, must be [tokens, topk] = {list(shape)}"
        if topk_idx.dtype not in (torch.int64, torch.int32):
            return f"topk_idx has dtype {topk_idx.dtype}, must be torch.int64 or torch.int32"
        used = topk_idx[:num_valid]
        if used.numel():
            low, high = (int(bound) for bound in used.aminmax())
            if low < -1 or high >= w.num_experts:
                wrong = low if low < -1 else high
                return f"topk_idx holds expert {wrong}, allowed are -1 (none) to {w.num_experts - 1}"
        if topk_weights is None:
            return None
        if tuple(topk_weights.shape) != shape or topk_weights.dtype != torch.float32:
            return (
                f"topk_weights is {topk_weights.dtype} {list(topk_weights.shape)}, "
                f"must be torch.float32 {list(shape)}"
            )
        wrong_weights = ~topk_weights[:num_valid].isfinite()
        if self.plan.checked and wrong_weights.any():
            token, k = wrong_weights.nonzero()[0].tolist()
            return f"topk_weights[{token}, {k}] is {topk_weights[token, k].item()}, must be finite"
        return None

    def _route(
        self, x: Tensor, topk_idx: Tensor | None, topk_weights: Tensor | None, num_valid: int | None
    ) -> SentRecords:
        assert topk_idx is not None
        idx = topk_idx.cpu().to(torch.int64)
        if num_valid is not None:
            idx = idx.masked_fill(torch.arange(len(x))[:, None] >= num_valid, -1)
        weights = torch.ones(idx.shape) if topk_weights is None else topk_weights.detach().cpu()
        return route(self._view, idx, weights)

    def _refuse_combine(
        self, y: Tensor, handle: Handle, lane: int, row_weights: Tensor | None
    ) -> UbepError | None:
        stale = self._stale(handle, lane)
        if stale is not None:
            return stale
        problem = self._wrong_rows("y", y)
        if problem is None and len(y) != handle.num_rows:
            problem = f"y has {len(y)} rows, the dispatch of this handle delivered {handle.num_rows}"
        if problem is None and row_weights is not None:
            shape = [handle.num_rows, self.plan.workload.topk][: 1 + self.plan.per_rank]
            if list(row_weights.shape) != shape or row_weights.dtype != torch.float32:
                problem = (
                    f"row_weights is {row_weights.dtype} {list(row_weights.shape)}, "
                    f"must be torch.float32 {shape}"
                )
        return None if problem is None else InvalidInputError(problem)

    def _stale(self, handle: Handle, lane: int) -> UbepError | None:
        if handle.generation != self.generation:
            return StaleHandleError(
                f"this handle belongs to layer {handle.generation}, it was used on layer {self.generation}"
            )
        if handle.lane != lane:
            return StaleHandleError(f"this handle belongs to lane {handle.lane}, it was used on lane {lane}")
        if handle.released:
            return StaleHandleError(f"this handle (epoch {handle.epoch}) was released")
        return None

    # ---- life

    def block(self, steps: Generator[Blocked | None, None, T]) -> T:
        """Run one of the step generators to its end and return its result."""
        return run(steps, self._take_timeout())

    def _take_timeout(self) -> float:
        """The deadline of the next operation, which is longer for a layer's first."""
        timeout_s, self._next_timeout_s = self._next_timeout_s, self._timeout_s
        return timeout_s

    def _give_up(self, operation: str, epoch: int, error: BaseException) -> None:
        self._unusable = f"it was given up after {type(error).__name__} in {operation} (epoch {epoch})"

    def close(self) -> None:
        """Refuse any further use. Windows are released with the communicator."""
        self._unusable = "it is closed"
