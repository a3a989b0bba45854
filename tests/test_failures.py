"""Ranks that die, hang or leave: every survivor raises within its deadline, and says who and where."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import ubep
from tests.ranks import outcome, run_ranks
from tests.worlds import Case, build, program
from ubep.errors import DeadlockError, LaunchError
from ubep.protocol.planner import PlanOptions

SIZES = {"num_experts": 4, "hidden": 8, "topk": 1, "max_tokens": 4, "dtype": torch.float32}
CALL = (torch.ones(2, 8), torch.tensor([[0], [3]]), torch.ones(2, 1))


def one_stays_away(comm: ubep.Communicator, where: str) -> list[tuple[str, str]]:
    layer = comm.expert_parallel(**SIZES)
    layer.combine((received := layer.dispatch(*CALL)).x, received.handle)
    if where == "combine":
        received = layer.dispatch(*CALL)
    if comm.rank == 1:
        time.sleep(2.5)
        return []
    call = (
        (lambda: layer.dispatch(*CALL))
        if where == "dispatch"
        else (lambda: layer.combine(received.x, received.handle))
    )
    return [outcome(call), outcome(lambda: layer.dispatch(*CALL))]


@pytest.mark.parametrize(("where", "epoch"), [("dispatch", 3), ("combine", 4)])
def test_a_rank_that_stays_away_is_named_with_operation_phase_epoch_and_progress(
    where: str, epoch: int
) -> None:
    first, _, third = run_ranks("reference", 3, one_stays_away, where, timeout_s=1.0)
    for (kind, text), (after, why) in (first, third):
        assert kind == "DeadlineError"
        assert "no answer within 1 s" in text
        assert f"in {where} waits for announcements" in text
        assert f"(epoch {epoch}, lane 0)" in text
        assert "rank 1: nothing announced" in text.split("missing:")[1]
        assert (after, "given up after DeadlineError" in why) == ("ClosedError", True)


def one_dies(comm: ubep.Communicator) -> tuple[tuple[str, str], float]:
    layer = comm.expert_parallel(**SIZES)
    received = layer.dispatch(*CALL)
    if comm.rank == 1:
        os._exit(9)
    begin = time.monotonic()
    return outcome(lambda: layer.combine(received.x, received.handle)), time.monotonic() - begin


def test_a_rank_that_dies_is_named_long_before_the_deadline(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        run_ranks("reference", 3, lambda comm: print(comm.rank, *one_dies(comm), flush=True), timeout_s=30.0)
    assert "rank 1: ended with exit code 9" in str(caught.value)
    printed = capfd.readouterr().out
    assert printed.count("PeerFailureError") == 2
    assert printed.count("rank 1 failed") == 2
    assert "in combine waits for" in printed


def leaves_early(comm: ubep.Communicator) -> tuple[str, str]:
    layer = comm.expert_parallel(**SIZES)
    layer.dispatch(*CALL)
    return outcome(lambda: layer.dispatch(*CALL)) if comm.rank else ("", "")


def test_virtual_ranks_report_a_wait_that_cannot_end() -> None:
    _, (kind, text) = run_ranks("virtual", 2, leaves_early)
    assert kind == "DeadlockError"
    assert "rank 0: nothing announced" in text


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("step", [5, 20, 40, 60, 80])
def test_a_rank_killed_at_any_step_leaves_no_wrong_result(rank: int, step: int) -> None:
    """Survivors either finish with the right answer, or stop; killing comes at every phase as steps go by."""
    case = Case(world_size=3, tokens=(4, 3), rounds=2, killed={rank: step})
    world, layers = build(case)
    with pytest.raises(DeadlockError, match="is held"):
        world.run([program(case, layer) for layer in layers])


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("steps", [10, 30, 60, 100])
@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_a_rank_delayed_at_any_phase_changes_nothing(rank: int, steps: int, checked: bool) -> None:
    from tests.worlds import check

    options = PlanOptions(placement="staged", checked=checked, chunk_records=1)
    check(Case(world_size=3, tokens=(4, 3), rounds=3, stalled={rank: steps}, options=options))


def closed_thrice(comm: ubep.Communicator) -> list[tuple[str, str]]:
    layer = comm.expert_parallel(**SIZES)
    layer.dispatch(*CALL)
    layer.close()
    comm.close()
    comm.close()
    return [outcome(lambda: layer.dispatch(*CALL)), outcome(lambda: comm.expert_parallel(**SIZES))]


@pytest.mark.parametrize("form", ["virtual", "reference"])
def test_close_is_idempotent_and_what_is_closed_says_so(form: str) -> None:
    for used, made in run_ranks(form, 2, closed_thrice):
        assert used == ("ClosedError", "this layer cannot be used: it is closed")
        assert made == ("ClosedError", "this communicator is closed")


def test_launch_tells_who_failed_and_why() -> None:
    def fail(comm: ubep.Communicator) -> None:
        if comm.rank == 1:
            raise RuntimeError("on purpose")

    with pytest.raises(LaunchError, match=r"rank 1: Traceback[\s\S]*RuntimeError: on purpose"):
        ubep.launch(fail, 2, config=ubep.Config(backend="reference"))


def test_launch_is_bounded_in_time() -> None:
    with pytest.raises(LaunchError, match="rank 0: was still running"):
        ubep.launch(lambda comm: time.sleep(60), 1, config=ubep.Config(backend="reference"), timeout_s=0.5)


def test_launch_returns_what_ranks_return() -> None:
    results = ubep.launch(lambda comm, base: torch.full((2,), base + comm.rank), 2, (10,))
    assert [r.tolist() for r in results] == [[10, 10], [11, 11]]


def test_ranks_end_with_the_process_that_launched_them() -> None:
    code = (
        "import os, time, ubep\n"
        "def wait(comm):\n"
        "    os.write(1, b'%d\\n' % os.getpid()); time.sleep(60)\n"
        "ubep.launch(wait, 2, config=ubep.Config(backend='reference'))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        ranks = [int(parent.stdout.readline()) for _ in range(2)]
        parent.kill()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < deadline, "ranks are still there"
        time.sleep(0.01)
