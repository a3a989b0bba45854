"""Gradients of dispatch and combine: each is the other one's backward.

Backward of dispatch is a combine without weights: dL/dx = sum_k dL/drow_k, and the gradients of the
rows' weights come back beside it. Backward of combine is a dispatch of dL/dout over the same routing:
dL/drow = w dL/dout, and dL/dw = <dL/dout, row>, which then travels back through dispatch's backward.
So every rank runs the same operations in backward too, in the same order, tokens or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ubep.errors import UnsupportedError
from ubep.handle import Handle, Received

if TYPE_CHECKING:
    from ubep.expert_parallel import ExpertParallel


def wanted(*tensors: Tensor | None) -> bool:
    """Whether gradients are recorded for any of these."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                return True
    return False


def dispatch(
    layer: ExpertParallel,
    x: Tensor,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    handle: Handle | None,
    num_valid: int | None,
    lane: int,
) -> Received:
    """Dispatch whose rows and weights carry gradients. Raises UnsupportedError for quantised layers."""
    if layer.plan.workload.quantise != "none":
        raise UnsupportedError("quantise", "gradients need a layer with quantise='none'")
    box: list[Received] = []
    rows, weights = _Dispatch.apply(  # type: ignore[no-untyped-call]
        x, topk_weights, layer, (topk_idx, handle, num_valid, lane), box
    )
    (received,) = box
    received.handle.weights = weights
    return Received(rows, None, weights, received.handle)


def combine(layer: ExpertParallel, y: Tensor, handle: Handle) -> Tensor:
    """Combine whose output carries gradients to y and to the weights of the dispatch."""
    out: Tensor = _Combine.apply(y, handle.weights, layer, handle)  # type: ignore[no-untyped-call]
    return out


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, topk_weights: Tensor | None, layer: Any, call: Any, box: Any) -> Any:
        topk_idx, handle, num_valid, lane = call
        received = layer.dispatch_now(x, topk_idx, topk_weights, handle, num_valid, False, lane)
        box.append(received)
        ctx.layer, ctx.handle = layer, received.handle
        return received.x, received.weights

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor) -> Any:
        layer, handle = ctx.layer, ctx.handle
        out, back = layer.combine_now(
            grad_rows.contiguous(), handle, handle.lane, weighted=False, row_weights=grad_weights
        )
        needs_x, needs_weights = ctx.needs_input_grad[:2]
        return out if needs_x else None, back if needs_weights else None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor | None, layer: Any, handle: Handle) -> Tensor:
        ctx.layer, ctx.handle = layer, handle
        ctx.save_for_backward(y)
        out: Tensor = layer.combine_now(y, handle, handle.lane)[0]
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        layer, handle = ctx.layer, ctx.handle
        (y,) = ctx.saved_tensors
        sent_back = layer.dispatch_now(grad_out.contiguous(), handle=handle, lane=handle.lane)
        grad_rows = sent_back.x.float()
        if layer.plan.workload.combine == "sum":
            return grad_rows.to(y.dtype), None, None, None
        weight = sent_back.weights
        inner = (grad_rows * y.float()).sum(1)
        if layer.plan.per_rank:
            grad_weights = torch.where(sent_back.topk_idx >= 0, inner[:, None], 0.0)
            weight = weight.sum(1)
        else:
            grad_weights = inner
        needs_weights = ctx.needs_input_grad[1]
        return (weight[:, None] * grad_rows).to(y.dtype), grad_weights if needs_weights else None, None, None
