"""Ranks that torchrun starts need no code of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch, ubep
with ubep.Communicator(config=ubep.Config(backend="reference")) as comm:
    layer = comm.expert_parallel(num_experts=4, hidden=8, topk=2, max_tokens=4, dtype="float32")
    received = layer.dispatch(torch.ones(2, 8), torch.tensor([[0, 3], [1, 2]]))
    out = layer.combine(received.x, received.handle)
    print(f"rank {comm.rank} of {comm.world_size}: {out[0, 0].item()} over {layer.plan.topology.tiers}")
    torch.distributed.barrier()
"""


def test_a_communicator_takes_torchruns_environment(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "script.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank {rank} of 2: 2.0 over ('node',)" in done.stdout
