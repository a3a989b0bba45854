"""Records what every worker did and when; writes traces that Perfetto and chrome://tracing load."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ubep.protocol import actions as act
from ubep.protocol.operation import Operation


@dataclass(frozen=True)
class TraceEvent:
    """One action. Times in seconds of the machine's monotonic clock; peer -1: none."""

    rank: int
    worker: int
    operation: str
    epoch: int
    lane: int
    action: str
    peer: int
    nbytes: int
    begin: float
    end: float


class Tracer:
    """Collects events of one rank."""

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []

    def record(self, op: Operation, worker: int, action: act.Action, begin: float, end: float) -> None:
        self.events.append(
            TraceEvent(
                rank=op.rank,
                worker=worker,
                operation=op.name,
                epoch=op.epoch,
                lane=op.lane,
                action=type(action).__name__,
                peer=getattr(action, "peer", -1),
                nbytes=getattr(action, "nbytes", 0),
                begin=begin,
                end=end,
            )
        )


def write_trace(path: Path, events: Sequence[TraceEvent]) -> None:
    """Chrome trace-event JSON: a process for each rank, a thread for each worker; microseconds."""
    rows = [
        {
            "name": f"{event.operation}.{event.action}",
            "cat": event.operation,
            "ph": "X",
            "ts": event.begin * 1e6,
            "dur": (event.end - event.begin) * 1e6,
            "pid": event.rank,
            "tid": event.worker,
            "args": {k: v for k, v in asdict(event).items() if k in ("peer", "nbytes", "epoch", "lane")},
        }
        for event in events
    ]
    names = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({event.rank for event in events})
    ]
    path.write_text(json.dumps({"traceEvents": names + rows, "displayTimeUnit": "ns"}))
