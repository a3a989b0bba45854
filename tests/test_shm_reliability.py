"""Ranks that are killed, hang, leave or fork; strangers; and what remains afterwards."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ubep
from tests.ranks import outcome
from tests.shm_ranks import draw, needs_shm, run
from ubep.errors import CapacityError, ClosedError, LaunchError

pytestmark = needs_shm

SIZES = {"num_experts": 6, "hidden": 16, "topk": 2, "max_tokens": 8, "dtype": torch.float32}
VICTIM = 1


def rounds(layer: Any, rank: int, n: int = 3) -> None:
    for round_ in range(n):
        received = layer.dispatch(*draw(rank + round_, 8, 6, 2, 16, torch.float32, empty=0))
        layer.combine(received.x * 2, received.handle)


def strike(layer: Any, at: int, what: Callable[[], None]) -> None:
    """Let this rank run by the driver, and do something at its `at`-th write into a window."""
    layer._fused = None
    fabric, writes = layer._fabric, iter(range(10**6))

    def counted(write: Callable[..., None]) -> Callable[..., None]:
        def wrapper(*args: Any) -> None:
            if next(writes) == at:
                what()
            write(*args)

        return wrapper

    fabric.put, fabric.signal = counted(fabric.put), counted(fabric.signal)


def with_a_victim(comm: ubep.Communicator, folder: Path, at: int, kill: bool) -> None:
    layer = comm.expert_parallel(**SIZES)
    rounds(layer, comm.rank, 1)
    if comm.rank == VICTIM:
        hang = (lambda: os.kill(os.getpid(), signal.SIGKILL)) if kill else (lambda: time.sleep(3))
        strike(layer, at, hang)
    begin = time.monotonic()
    kind, text = outcome(lambda: rounds(layer, comm.rank))
    report = {"kind": kind, "text": text, "seconds": time.monotonic() - begin}
    (folder / str(comm.rank)).write_text(json.dumps(report))


# Writes of one rank in a round: an announcement to each of 3 ranks (2 each), then chunks to each (2 each).
@pytest.mark.parametrize("at", [0, 1, 3, 6, 7, 9, 12, 14, 18, 24, 25, 31])
def test_every_survivor_of_a_kill_names_rank_operation_phase_and_epoch(tmp_path: Path, at: int) -> None:
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(LaunchError):
        run(3, with_a_victim, tmp_path, at, True, placement="staged", timeout_s=20.0, chunk_records=2)
    for rank in (0, 2):
        report = json.loads((tmp_path / str(rank)).read_text())
        assert report["kind"] == "PeerFailureError", report
        assert report["seconds"] < 10
        assert re.search(
            rf"rank {VICTIM} failed: its process \d+ has died; rank {rank} in (dispatch|combine) waits "
            r"for (rows|announcements) of rank \d \(epoch \d+, lane 0\); missing: .*rank 1: ",
            report["text"],
        ), report["text"]
    new = set(os.listdir("/dev/shm")) - before
    assert not [name for name in new if name.startswith(("ubep", "torch", "psm", "sem.", "mp-"))]


@pytest.mark.parametrize(
    ("at", "phase"),
    [(0, "announcements"), (3, "announcements"), (9, "rows"), (25, "announcements"), (31, "rows")],
)
def test_deadline_in_each_phase(tmp_path: Path, at: int, phase: str) -> None:
    for _ in range(4):  # on a busy machine the rank that shows the phase may see another one give up first
        run(3, with_a_victim, tmp_path, at, False, placement="staged", timeout_s=0.5, chunk_records=2)
        reports = [json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 2)]
        late = [report["text"] for report in reports if report["kind"] == "DeadlineError"]
        if any(f"waits for {phase} of rank 1" in text for text in late):
            break
    assert any(f"waits for {phase} of rank 1" in text for text in late), reports
    assert all("no answer within 0.5 s" in text for text in late)
    # A rank that was further on may see first that another one has given up.
    others = [report["text"] for report in reports if report["kind"] == "PeerFailureError"]
    assert len(late) + len(others) == 2
    assert all("has closed its communicator" in text for text in others)


def one_leaves(comm: ubep.Communicator) -> tuple[str, str]:
    layer = comm.expert_parallel(**SIZES)
    rounds(layer, comm.rank, 1)
    if comm.rank == VICTIM:
        comm.close()
        time.sleep(0.3)
        return "", ""
    begin = time.monotonic()
    said = outcome(lambda: rounds(layer, comm.rank))
    assert time.monotonic() - begin < 2
    return said


def test_a_rank_that_closes_early_is_noticed_at_once() -> None:
    said = [what for rank, what in enumerate(run(3, one_leaves)) if rank != VICTIM]
    assert [kind for kind, _ in said] == ["PeerFailureError"] * 2
    # One of them may see the other, which has given up before, leave as well.
    assert all("it has closed its communicator" in text for _, text in said)
    assert any("rank 1 failed" in text for _, text in said)


def forked(comm: ubep.Communicator) -> str:
    layer = comm.expert_parallel(**SIZES)
    rounds(layer, comm.rank, 1)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            kind, text = outcome(lambda: rounds(layer, comm.rank, 1))
            os.write(writing, f"{kind}: {text}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    rounds(layer, comm.rank, 1)  # the parent goes on
    return os.read(reading, 4096).decode()


@pytest.mark.parametrize("fused", [True, False])
def test_a_forked_child_is_refused_and_the_parent_goes_on(fused: bool) -> None:
    for said in run(2, forked, fused=fused):
        assert said.startswith("ClosedError: ")
        assert "open one after the fork" in said


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def cycle(config: ubep.Config, bootstrap: Any = None) -> None:
    with ubep.Communicator(config=config, bootstrap=bootstrap) as comm:
        rounds(comm.expert_parallel(**SIZES), comm.rank, 1)


def cycles(comm: ubep.Communicator, n: int) -> tuple[int, int]:
    for _ in range(50):
        cycle(comm.config)
    gc.collect()
    files, memory = open_files(), resident_kib()
    for _ in range(n):
        cycle(comm.config)
    gc.collect()
    return open_files() - files, resident_kib() - memory


@pytest.mark.parametrize(("world_size", "n"), [(1, 1000), (2, 60)])
def test_cycles_of_open_and_close_leave_nothing(world_size: int, n: int) -> None:
    for files, memory in run(world_size, cycles, n):
        assert files == 0
        assert memory < 8192  # KiB; one window kept in every cycle would be more


def test_tensors_outlive_their_communicator() -> None:
    config = ubep.Config(backend="shm")
    with ubep.Communicator(config=config) as comm:
        layer = comm.expert_parallel(**SIZES)
        x, idx, weights = draw(0, 4, 6, 2, 16, torch.float32, empty=0)
        received = layer.dispatch(x, idx, weights)
    assert torch.equal(received.x.sum(), received.x.clone().sum())
    assert received.weights.shape == (8,)
    with pytest.raises(ClosedError):
        layer.dispatch(x, idx, weights)


def test_another_user_cannot_attach() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    from ubep_backends.shm import _native

    fabric = _native.Fabric(0, 2)
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(f"\0{fabric.address}")
            hello = fabric.secret.encode() + (1).to_bytes(4, "little")
            socket.send_fds(stranger, [hello], [os.memfd_create("stranger")])
            time.sleep(0.5)
        os._exit(0)
    other = _native.Fabric(1, 2)
    with pytest.raises(RuntimeError, match="1 ranks did not connect in time"):
        fabric.join([fabric.address, other.address], [fabric.secret, other.secret], 0.4)
    os.waitpid(child, 0)


def too_large(comm: ubep.Communicator) -> str:
    with pytest.raises(CapacityError) as error:
        comm.expert_parallel(num_experts=8, hidden=65536, topk=8, max_tokens=1 << 20)
    return str(error.value)


def test_what_cannot_fit_is_refused_with_numbers_on_every_rank() -> None:
    for said in run(2, too_large):
        needed, available = map(int, re.findall(r"\d{5,}", said))
        assert needed > 1 << 32
        assert needed > available


def test_offsets_beyond_32_bits_are_refused_not_truncated() -> None:
    from ubep_backends.shm import _native

    fabric = _native.Fabric(0, 1)
    fabric.join([fabric.address], [fabric.secret], 1.0)
    fabric.reserve(4096)
    window = fabric.map_window(True)
    data = torch.zeros(16, dtype=torch.uint8)
    for offset in (4096, (1 << 31) - 8, 1 << 32, (1 << 32) + 8, (1 << 63) + 8):
        with pytest.raises(IndexError):
            fabric.put(window, 0, offset, data.data_ptr(), 16)
    fabric.close()


def soak(comm: ubep.Communicator, n: int) -> int:
    """Rows whose every element is a hash of source, round and token; returns how many were wrong."""
    layer = comm.expert_parallel(**SIZES)
    column, wrong = torch.arange(16), 0
    for round_ in range(n):
        tokens = (round_ * 7 + comm.rank) % 9
        seed = torch.arange(tokens) * 31 + comm.rank * 7 + round_ * 13
        x = ((seed[:, None] + column * 5) % 8191).float()
        idx = torch.stack((seed % 6, (seed + 1) % 6), 1)
        received = layer.dispatch(x, idx, torch.full((tokens, 2), 0.5))
        sent = received.source_token * 31 + received.source_rank * 7 + round_ * 13
        wrong += int((received.x != ((sent[:, None] + column * 5) % 8191)).any(1).sum())
        wrong += int((layer.combine(received.x, received.handle) != x).any(1).sum())
    return wrong


@pytest.mark.parametrize("placement", ["direct", "staged"])
def test_soak(placement: str) -> None:
    n = int(os.environ.get("UBEP_SOAK_ROUNDS", "1000"))
    assert run(2, soak, n, placement=placement) == [0, 0]
