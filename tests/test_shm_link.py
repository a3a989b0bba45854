"""The emulated link: real ranks and flags, but bytes take as long as the link says."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ubep
from tests.shm_ranks import draw, needs_shm, run
from ubep.errors import ConfigError

pytestmark = needs_shm

SIZES: dict[str, Any] = {"num_experts": 8, "hidden": 512, "topk": 4, "max_tokens": 64, "dtype": torch.float32}
PER_RANK = 64 * 4 * 512 * 4  # bytes that one rank sends in one operation, itself included
SLOW = {"node": {"bandwidth_gbps": 0.05, "latency_us": 100.0}}


def timed(comm: ubep.Communicator, options: dict[str, Any], settings: dict[str, Any]) -> float:
    config = ubep.Config(
        backend="shm", placement="staged", deduplicate=False, options={"shm": options}, **settings
    )
    with ubep.Communicator(config=config) as own:
        layer = own.expert_parallel(**SIZES)
        x, idx, weights = draw(comm.rank, 64, 8, 4, 512, torch.float32, empty=0)
        times = []
        for _ in range(3):
            dist.barrier()
            begin = time.perf_counter()
            received = layer.dispatch(x, idx, weights)
            out = layer.combine(received.x, received.handle)
            times.append(time.perf_counter() - begin)
            assert torch.allclose(out, x * weights.sum(1, keepdim=True), atol=1e-4)
        return min(times)


@pytest.mark.parametrize("settings", [{}, {"chunk_records": 16}, {"checked": False, "workers": 2}], ids=str)
def test_a_round_takes_at_least_what_the_link_takes(settings: dict[str, Any]) -> None:
    wire_s = 2 * PER_RANK / 2 / 0.05e9  # both operations; half of the rows stay
    for seconds in run(2, timed, {"link": SLOW}, settings):
        assert seconds > wire_s * 0.8


def test_chunks_flags_and_rotation_beat_whole_messages_barriers_and_rank_order() -> None:
    """Emulated times follow from the link; where others take the cores, try again."""
    whole = {"order": "rank", "chunk_records": 10**6}
    chunked = {"order": "rotated", "chunk_records": 16, "checked": False}
    ratios = []
    while not ratios or (ratios[-1] <= 1.2 and len(ratios) < 4):
        bulk = run(4, timed, {"link": {**SLOW, "bulk_synchronous": True}}, whole)
        ours = run(4, timed, {"link": SLOW}, chunked)
        ratios.append(max(bulk) / max(ours))
    assert ratios[-1] > 1.2, ratios


def test_the_link_can_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "link.toml"
    file.write_text("[node]\nbandwidth_gbps = 0.05\nlatency_us = 100.0\n")
    assert all(seconds > 0.01 for seconds in run(2, timed, {"link": str(file)}, {}))


@pytest.mark.parametrize(
    ("options", "placement", "text"),
    [
        ({"link": SLOW}, "direct", "needs placement = 'staged'"),
        ({"link": {"pod": SLOW["node"]}}, "staged", "unknown tier 'pod'; the tiers are node"),
        ({"link": {}}, "staged", "options.shm.link.node is missing"),
        ({"link": {"node": {"bandwidth_gbps": 0}}}, "staged", "must be above 0"),
        ({"link": {"node": {"bandwidth_gbps": 1, "latency_us": -1}}}, "staged", "must be 0 or more"),
        ({"link": "no-such-file.toml"}, "staged", "cannot read no-such-file.toml"),
        ({"link": 3}, "staged", "must be a table or the path of a file"),
        ({"spin": 3}, "staged", "unknown key 'spin'; did you mean 'spins'?"),
        ({"yields": -1}, "staged", "must be a number, 0 or more"),
        ({"pin": 1}, "staged", "must be true or false"),
    ],
)
def test_wrong_options_name_the_key(options: dict[str, Any], placement: Any, text: str) -> None:
    config = ubep.Config(backend="shm", placement=placement, options={"shm": options})
    with ubep.Communicator(config=config) as comm, pytest.raises(ConfigError) as error:
        comm.expert_parallel(**SIZES)
    assert text in str(error.value)


def one_rank_differs(comm: ubep.Communicator, options: dict[str, Any]) -> str:
    own = options if comm.rank == 1 else {}
    config = ubep.Config(backend="shm", placement="staged", options={"shm": own})
    with ubep.Communicator(config=config) as other, pytest.raises(ubep.UbepError) as error:
        other.expert_parallel(**SIZES)
    return str(error.value)


@pytest.mark.parametrize("options", [{"spin": 1}, {"link": {}}, {"link": SLOW}], ids=str)
def test_options_that_differ_between_ranks_are_refused_on_all(options: dict[str, Any]) -> None:
    assert all("options.shm" in said for said in run(2, one_rank_differs, options))
