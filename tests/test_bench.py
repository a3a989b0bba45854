"""The benchmark: its arithmetic, its rules for noise, its contestants' answers. Never absolute times."""

from __future__ import annotations

import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import ubep
from tests.test_cli import ubep as command
from ubep.bench import blocks, html, job, link, report, start, svg
from ubep.bench.arena import Arena
from ubep.bench.case import Case, Inputs, telling_expert, telling_factor, touch, touch_factor
from ubep.bench.kernels import METHODS, Kernels, TorchKernels
from ubep.bench.noise import TICKS_PER_SECOND, CpuTimes, Noise, parse_stat, shares
from ubep.errors import ConfigError, InvalidInputError

CASE = Case(ranks=2, tokens=5, hidden=16, experts=6, topk=3)

# ---- statistics, with answers worked out by hand


def test_job_time_is_from_the_first_start_to_the_last_end() -> None:
    starts = [[1000, 20_000], [3000, 19_000]]
    ends = [[5000, 30_000], [4000, 31_500]]
    assert blocks.job_times_us(starts, ends) == [4.0, 12.5]


def test_medians_are_taken_block_by_block() -> None:
    assert blocks.block_medians([1, 9, 2, 30, 10, 20], kept=3) == [2, 20]
    assert len(blocks.block_medians([1.0] * 6 * 12)) == 12  # of 8 rounds, 6 are kept


def test_a_ratio_pairs_blocks_before_it_takes_the_median() -> None:
    # A machine that slows down between blocks: every pair says 3, spread or not.
    ratio = blocks.paired_ratio([3, 6, 3, 6, 12], [1, 2, 1, 2, 4])
    assert (ratio.median, ratio.low, ratio.high) == (3, 3, 3)
    # Pairs say 1, 1 and 9; the ratio of the medians would be 2.
    assert blocks.paired_ratio([1, 2, 9], [1, 2, 1]).median == 1
    ratio = blocks.paired_ratio([2, 4, 6, 8, 10], [1, 1, 1, 1, 1])
    assert (ratio.median, ratio.low, ratio.high) == (6, 4, 8)
    assert blocks.spread([5.0]) == blocks.Ratio(5.0, 5.0, 5.0)


def test_percentile_and_geometric_mean() -> None:
    assert blocks.percentile(list(range(101)), 99) == 99
    assert blocks.percentile([10, 20], 50) == 15
    assert blocks.percentile([7], 99) == 7
    assert blocks.geometric_mean([2, 8]) == pytest.approx(4)


def test_order_of_blocks_is_random_complete_and_the_same_everywhere() -> None:
    orders = [blocks.order_of_block(7, block, 5) for block in range(40)]
    assert all(sorted(order) == list(range(5)) for order in orders)
    assert orders == [blocks.order_of_block(7, block, 5) for block in range(40)]
    assert orders != [blocks.order_of_block(8, block, 5) for block in range(40)]
    assert {order[0] for order in orders} == set(range(5))  # nobody always comes first


# ---- noise

STAT = """cpu  900 0 900 900 0 0 0 900 0 0
cpu0 100 10 20 1000 50 3 7 40 5 0
cpu1 200 0 30 900 0 0 0 10 0 0
cpu2 5000 0 0 0 0 0 0 5000 0 0
cpu10 7 0 0 0 0 0 0 0 0 0
intr 12345
"""


def test_proc_stat_is_read_for_the_usable_cores_alone() -> None:
    # user + nice + system + irq + softirq; guest is part of user
    assert parse_stat(STAT, [0, 1]) == CpuTimes((140 + 230) / TICKS_PER_SECOND, 50 / TICKS_PER_SECOND)
    assert parse_stat(STAT, [1]) == CpuTimes(230 / TICKS_PER_SECOND, 10 / TICKS_PER_SECOND)
    assert parse_stat("", [0]) == CpuTimes(0, 0)


def test_foreign_load_is_what_the_ranks_did_not_use() -> None:
    # 2 cores for 10 s are 20 s; 15 s were busy, 12 of them ours; 1 s was stolen
    foreign, steal = shares(CpuTimes(100, 5), CpuTimes(115, 6), own_s=12, elapsed_s=10, cores=2)
    assert (foreign, steal) == (pytest.approx(15), pytest.approx(5))
    assert shares(CpuTimes(0, 0), CpuTimes(1, 0), own_s=1.01, elapsed_s=10, cores=2)[0] == 0


@pytest.mark.parametrize(
    ("foreign", "steal", "pingpong", "words"),
    [
        (6.0, 2.0, (100, 160), []),
        (0.0, 0.0, (None, None), []),
        (6.1, 0.0, (100, 100), ["foreign load 6.1 %"]),
        (0.0, 2.5, (100, 100), ["steal 2.5 %"]),
        (0.0, 0.0, (100, 161), ["100 ns before, 161 ns after"]),
        (0.0, 0.0, (250, 100), ["250 ns before, 100 ns after"]),
        (50.0, 9.0, (50, 250), ["foreign", "steal", "core to core"]),
    ],
)
def test_what_is_rejected(foreign: float, steal: float, pingpong: Any, words: list[str]) -> None:
    said = Noise(foreign, steal, pingpong, (0.0, 0.0, 0.0)).objections()
    assert len(said) == len(words)
    assert all(word in text for word, text in zip(words, said, strict=True))


class Samples:
    """Stands for the ranks of a job whose samples have these loads, one after the other."""

    def __init__(self, loads: list[float], attempts: int) -> None:
        self.loads = iter(loads)
        self.spec = job.Spec((CASE,), (), ubep.Config(), attempts=attempts)
        self.arena = self

    def decide(self, value: int) -> int:
        return value

    def _sample(self, attempt: int) -> list[job.Sample]:
        foreign = next(self.loads)
        noise = Noise(foreign, 0.0, (None, None), (0.0, 0.0, 0.0))
        return [job.Sample({}, 0, {}, {}, {"foreign_percent": foreign}, noise.objections())]


@pytest.mark.parametrize(
    ("loads", "kept", "rejected"), [([3], 3, 0), ([30, 2], 2, 1), ([30, 20, 1], 1, 2), ([30, 20, 40], 20, 2)]
)
def test_noisy_samples_are_repeated_and_the_quietest_is_kept(
    loads: list[float], kept: float, rejected: int
) -> None:
    (sample,) = job._Runner._first_quiet(Samples(loads, 3))  # type: ignore[arg-type]
    assert sample.noise["foreign_percent"] == kept
    assert sample.accepted == (kept <= 6)
    assert len(sample.rejected) == rejected


# ---- answers


def test_a_row_of_the_wrong_expert_is_noticed() -> None:
    inputs = Inputs(CASE, rank=1)
    routing, x, factor = inputs.sets[0], inputs.x.float(), telling_factor(CASE)
    terms = routing.weights * factor[routing.idx]
    right = (terms.sum(1, keepdim=True) * x).to(torch.bfloat16)
    assert inputs.wrong(0, right, factor) is None
    swapped = routing.idx.clone()
    swapped[2, 0] = next(e for e in range(6) if e not in swapped[2].tolist())
    wrong = (routing.weights * factor[swapped]).sum(1, keepdim=True) * x
    assert "differs" in (inputs.wrong(0, wrong, factor) or "")
    right[3, 4] = float("nan")
    assert inputs.wrong(0, right, factor) is not None


def test_the_experts_do_what_their_factors_say() -> None:
    rows = torch.randn(6, 16).to(torch.bfloat16)
    touched, told = rows.clone(), rows.clone()
    touch(touched, lambda: torch.tensor([6]))
    assert torch.equal(touched, rows * touch_factor(CASE)[0].to(rows.dtype))
    telling_expert(CASE, rank=1)(told, lambda: torch.tensor([1, 2, 3]))
    assert torch.equal(told, rows * telling_factor(CASE)[[3, 4, 4, 5, 5, 5], None].to(rows.dtype))


def test_kernels_of_torch_against_loops() -> None:
    kernels, inputs = TorchKernels(), Inputs(CASE, 0)
    routing, x = inputs.sets[0], inputs.x
    plan = kernels.sort_rows(routing.idx, 6)
    order = sorted((int(e), t, k) for t, row in enumerate(routing.idx) for k, e in enumerate(row))
    assert plan.token.tolist() == [t for _, t, _ in order]
    assert [int(plan.place[t, k]) for _, t, k in order] == list(range(15))
    assert plan.counts.tolist() == [sum(e == expert for e, _, _ in order) for expert in range(6)]
    there, back = kernels.regroup(torch.tensor([[2, 1], [0, 3]]))
    assert there.tolist() == [0, 1, 2, 3, 4, 5]
    there, back = kernels.regroup(torch.tensor([[1, 2], [2, 1]]))
    assert there.tolist() == [0, 3, 4, 1, 2, 5]
    assert there[back].tolist() == list(range(6))
    rows, out = torch.empty(15, 16, dtype=x.dtype), torch.empty_like(x)
    kernels.gather_rows(rows, x, plan.token)
    assert torch.equal(rows, x[plan.token])
    kernels.reduce_rows(out, rows, plan.place, routing.weights)
    assert inputs.wrong(0, out, torch.ones(6)) is None


def test_kernels_of_a_backend_are_used_and_what_is_missing_is_told() -> None:
    class Some:
        def gather_rows(self, out: Any, rows: Any, index: Any) -> str:
            return "native"

    class Offering:
        def kernels(self) -> Some:
            return Some()

    mixed: Any = Kernels(Offering())  # type: ignore[arg-type]
    assert mixed.gather_rows(None, None, None) == "native"
    assert mixed.label == "torch sort_rows, regroup, reduce_rows"
    assert Kernels(None).label == "torch kernels"

    class All:
        kernels = staticmethod(lambda: type("Every", (), dict.fromkeys(METHODS, lambda self: 1))())

    assert Kernels(All()).label == ""  # type: ignore[arg-type]


def test_the_arena_is_one_memory_with_a_barrier() -> None:
    def rank(comm: ubep.Communicator) -> tuple[list[int], int, bool]:
        arena = Arena(comm.bootstrap, 64)
        arena.area(1 - comm.rank)[:] = comm.rank + 1
        arena.barrier()
        seen = arena.area(comm.rank).unique().tolist()
        decided = arena.decide(7 if comm.rank == 0 else 9)
        took = arena.pingpong_ns([0, 1]) if len(os.sched_getaffinity(0)) > 1 else 1.0
        arena.close()
        return seen, decided, took is None or took > 0

    assert ubep.launch(rank, 2, config=ubep.Config(backend="reference")) == [([2], 7, True), ([1], 7, True)]


# ---- peers, and from samples to figures


def test_peers_that_cannot_run_are_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    chosen, skipped = start.choose_peers(["torch", "mpi", "torch"], 2)
    assert chosen == ("torch",)
    assert "mpi4py is not installed; fix: pip install" in skipped["mpi"]
    with pytest.raises(InvalidInputError, match="'mpy'; there are: mpi, gloo, torch, memcpy, own"):
        start.choose_peers(["mpy"], 2)


def test_another_mpi_than_open_mpi_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "mpiexec"
    other.write_text("#!/bin/sh\necho HYDRA build details\n")
    other.chmod(0o755)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(start, "mpiexec", lambda: str(other))
    assert "is not Open MPI" in (start.missing_mpi() or "")
    monkeypatch.setattr(start, "mpiexec", lambda: None)
    assert "no mpiexec" in (start.missing_mpi() or "")


def test_ranks_that_are_no_processes_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="'virtual' runs its ranks in one process"):
        start.check_backend("virtual")
    start.check_backend("reference")


def sample(launch: int, ours: list[float], theirs: list[float], objections: list[str]) -> job.Sample:
    times = {"ubep": ours, "mpi (torch kernels)": theirs}
    noise = {"pingpong_ns": (100.0, 110.0)}
    return job.Sample(vars(CASE).copy(), launch, times, times, noise, objections)


def test_noisy_launches_do_not_count_while_there_is_a_quiet_one() -> None:
    samples = [sample(0, [1, 1], [4, 4], []), sample(1, [1, 1], [6, 6], []), sample(2, [9, 9], [9, 9], ["x"])]
    (summary,) = report.summarise(samples, "ubep")
    figure = summary.figure("mpi")
    assert figure is not None
    assert figure.ratio is not None
    assert (figure.ratio.median, figure.ratio.low, figure.ratio.high) == (5, 4, 6)
    assert figure.launch_ratios == (4, 6)
    assert (summary.launches, summary.noisy, summary.pingpong_ns) == (2, False, 105)
    assert report.means([summary]) == {"mpi (torch kernels)": pytest.approx(5)}
    (summary,) = report.summarise(samples[2:], "ubep")
    assert summary.noisy


def test_the_ablation_changes_one_thing_at_a_time(tmp_path: Path) -> None:
    config = ubep.Config(options={"shm": {"pin": True}})
    made = link.variants(config, "shm", {"node": {"bandwidth_gbps": 1}})
    assert made[0].label == link.BASE
    assert made[0].settings["options"]["shm"] == {
        "pin": True,
        "link": {"node": {"bandwidth_gbps": 1}, "bulk_synchronous": True},
    }
    flat = [{**variant.settings, **variant.semantics} for variant in made]
    changed = [{k for k in b if a.get(k) != b[k]} for a, b in pairwise(flat)]
    assert changed == [{"options"}, {"chunk_records"}, {"order"}, {"order"}, {"deduplicate"}, {"quantise"}]
    with pytest.raises(ConfigError, match=r"cannot read the link .*nothing.toml"):
        link.read(tmp_path / "nothing.toml")


def test_plots_hold_every_series_and_escape_names() -> None:
    picture = svg.lines("t", "x", "y", {"a<b": [(8, 10), (32, 40)], "c": [(8, 5)]})
    assert picture.count("<polyline") == 2
    assert picture.count("<circle") == 3
    assert "a&lt;b" in picture
    assert svg.bars("t", "x", {"one": 1.0, "two": 2.0}).count("<rect") == 2
    assert svg.lines("t", "x", "y", {}) == svg.bars("t", "x", {}) == ""


# ---- the whole


def test_a_tiny_benchmark_from_end_to_end(tmp_path: Path) -> None:
    sizes = ["--ranks", "2", "--tokens", "3", "--hidden", "16", "--experts", "4", "--topk", "2"]
    fast = ["--seconds", "0", "--quiet", "0", "--attempts", "1"]
    files = ["--json", "b.json", "--html", "b.html"]
    peers = ["--backend", "reference", "--peer", "torch,memcpy,own"]
    done = command("bench", *peers, *sizes, *fast, *files, cwd=tmp_path, UBEP_TIMEOUT_S="60")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "Not measured" not in done.stdout
    found = json.loads((tmp_path / "b.json").read_text())
    (summary,), (measured,) = found["summaries"], found["samples"]
    assert [figure["label"] for figure in summary["figures"]] == ["ubep", "torch", "memcpy", "ubep (own x)"]
    assert all(len(times) >= 12 * 6 for times in measured["times_us"].values())
    assert measured["decisions"]["backend"] == "reference"
    assert found["provenance"]["versions"]["torch"] == torch.__version__
    page = (tmp_path / "b.html").read_text()
    assert page.count("<svg") == 2
    assert "memcpy" in page


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--peer", "nccl"], "unknown peer 'nccl'"),
        (["--tokens", "8,x"], "is not like"),
        (["--ranks", "3"], "128 experts must be a multiple of 3 ranks"),
        (["--backend", "virtual"], "runs its ranks in one process"),
    ],
)
def test_what_the_command_refuses(arguments: list[str], text: str, tmp_path: Path) -> None:
    done = command("bench", "--peer", "memcpy", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert text in done.stderr


def test_without_jinja2_the_page_is_refused_with_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ubep.UbepError, match="pip install"):
        html.write(tmp_path / "p.html", "t", [], "ubep", {}, report.provenance())
