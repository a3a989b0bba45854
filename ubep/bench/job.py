"""What every rank of the benchmark runs: all cases, all contestants, and the noise around them."""

from __future__ import annotations

import gc
import importlib
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ubep import registry
from ubep.bench import blocks
from ubep.bench.arena import Arena, pinned
from ubep.bench.case import ROUTING_SETS, Case, Inputs, touch
from ubep.bench.collectives import Gloo, Mpi, Plain
from ubep.bench.contestants import Contestant, Memcpy, OwnInput, Setting, Ubep, Variant, capacity_rows
from ubep.bench.kernels import Kernels
from ubep.bench.noise import Noise, cpu_times, shares
from ubep.communicator import Communicator
from ubep.config import Config

PEERS: dict[str, Callable[[], Contestant]] = {
    kind.name: kind for kind in (Mpi, Gloo, Plain, Memcpy, OwnInput)
}
PROGRESS_STEPS = 100  # of one case
MAX_BLOCKS = 400
QUIET_LOOK_S = 0.3
QUIET_PERCENT = 5.0  # of foreign load


@dataclass(frozen=True)
class Spec:
    """One launch. peers: names out of PEERS.  variants: of ubep.

    min_blocks: of each contestant.  seconds: at least this long for each case.  attempts: at a noisy
    sample.  quiet_s: to wait, at most, for others to leave the cores alone.
    """

    cases: tuple[Case, ...]
    peers: tuple[str, ...]
    config: Config
    variants: tuple[Variant, ...] = (Variant("ubep"),)
    min_blocks: int = blocks.MIN_BLOCKS
    seconds: float = 1.0
    attempts: int = 3
    quiet_s: float = 5.0
    launch: int = 0


@dataclass
class Sample:
    """One case in one launch. times_us: of kept rounds in the order they ran, by contestant's label.

    block_us: medians of the blocks, paired across contestants.  objections: why the noise was too much,
    empty if it wasn't.  rejected: those of earlier attempts.  skipped: why a contestant is not here.
    """

    case: dict[str, Any]
    launch: int
    times_us: dict[str, list[float]]
    block_us: dict[str, list[float]]
    noise: dict[str, Any]
    objections: list[str]
    rejected: list[list[str]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    pinned: bool = False
    decisions: dict[str, str] = field(default_factory=dict)

    @property
    def accepted(self) -> bool:
        return not self.objections


def run_rank(comm: Communicator, spec: Spec, progress_file: str) -> list[dict[str, Any]]:
    """All cases; the samples as plain data on rank 0, elsewhere nothing."""
    mpi = importlib.import_module("mpi4py.MPI") if "mpi" in spec.peers else None
    samples: list[Sample] = []
    with _Progress(progress_file) as progress:
        for number, case in enumerate(spec.cases):
            progress.begin = number * PROGRESS_STEPS
            samples += _Runner(comm, spec, case, progress.at, mpi).run()
            progress.at(1.0)
    return [asdict(sample) for sample in samples]


class _Progress:
    """A counter in a file that whoever launched the ranks looks at. begin: steps before this case."""

    begin = 0

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        self._map.close()

    def at(self, share: float) -> None:
        """This much of the case is done."""
        steps = max(self.begin + int(share * PROGRESS_STEPS), int.from_bytes(self._map[:8], sys.byteorder))
        self._map[:8] = steps.to_bytes(8, sys.byteorder)


def write_progress(path: Path) -> None:
    """An empty progress file."""
    path.write_bytes(bytes(8))


def read_progress(path: Path) -> int:
    """Steps done, PROGRESS_STEPS for each case."""
    return int.from_bytes(path.read_bytes(), sys.byteorder)


class _Runner:
    """One case in one launch, on one rank."""

    def __init__(
        self, comm: Communicator, spec: Spec, case: Case, progress: Callable[[float], None], mpi: Any
    ) -> None:
        self.boot, self.rank, self.spec, self.case = comm.bootstrap, comm.rank, spec, case
        self.cores: Sequence[int] = sorted(os.sched_getaffinity(0))
        self.progress = progress
        self.pin = case.ranks <= len(self.cores)
        self.arena = Arena(comm.bootstrap, capacity_rows(case) * case.row_bytes)
        self.inputs = Inputs(case, comm.rank)
        kernels = Kernels(_backend(spec.config))
        self.setting = Setting(case, self.inputs, self.arena, comm.bootstrap, kernels, spec.config, mpi)
        self.skipped: dict[str, str] = {}
        self.decisions: dict[str, str] = {}
        self.contestants: list[Contestant] = []

    def run(self) -> list[Sample]:
        """The first quiet sample, else the quietest; on rank 0."""
        wanted: list[Contestant] = [Ubep(variant) for variant in self.spec.variants]
        try:
            for contestant in wanted + [PEERS[name]() for name in self.spec.peers]:
                self._admit(contestant)
            return self._first_quiet() if self.contestants else []
        finally:
            for contestant in self.contestants:
                contestant.close()
            self.contestants.clear()
            self.arena.close()

    def _admit(self, contestant: Contestant) -> None:
        """Set up and validate; leave out with a reason what fails on any rank."""
        for step in ("set up", "validate"):
            problem = None
            try:
                if step == "set up":
                    contestant.setup(self.setting)
                else:
                    problem = contestant.validate(self.inputs)
            except Exception as error:  # one that cannot take part is named; the others go on
                problem = f"{type(error).__name__}: {error}"
            problem = self._together(problem)
            if problem is not None:
                self.skipped[contestant.label] = problem
                contestant.close()
                return
        self.contestants.append(contestant)
        if isinstance(contestant, Ubep):
            self.decisions = self.decisions or contestant.decisions

    def _together(self, problem: str | None) -> str | None:
        """The first rank's problem, on all ranks."""
        told = self.boot.all_gather(problem)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(told) if text), None)

    def _first_quiet(self) -> list[Sample]:
        best: list[Sample] = []
        rejected: list[list[str]] = []
        for attempt in range(self.spec.attempts):
            got = self._sample(attempt)
            if self.arena.decide(int(any(sample.accepted for sample in got))):
                best = got
                break
            rejected += [sample.objections for sample in got]
            best = min(best, got, key=_loudness) if best else got
        for sample in best:
            sample.rejected = [reasons for reasons in rejected if reasons is not sample.objections]
        return best

    def _sample(self, attempt: int) -> list[Sample]:
        self._wait_for_quiet()
        before = self.arena.pingpong_ns(self.cores)
        cpu, own, begin = cpu_times(self.cores), time.process_time(), time.monotonic()
        recorded, problems = self._blocks(self.spec.launch * 1000 + attempt)
        elapsed = time.monotonic() - begin
        used = sum(self.boot.all_gather(time.process_time() - own))
        foreign, steal = shares(cpu, cpu_times(self.cores), used, elapsed, len(self.cores))
        after = self.arena.pingpong_ns(self.cores)
        wrong = {label: self._together(problem) for label, problem in problems.items()}
        everyone = self.boot.all_gather(recorded)
        if self.rank != 0:
            return []
        noise = Noise(foreign, steal, (before, after), os.getloadavg())
        times = {
            label: blocks.job_times_us(*([rank[label][side] for rank in everyone] for side in (0, 1)))
            for label in recorded
            if wrong[label] is None
        }
        sample = Sample(
            case=asdict(self.case),
            launch=self.spec.launch,
            times_us=times,
            block_us={label: blocks.block_medians(values) for label, values in times.items()},
            noise=asdict(noise),
            objections=noise.objections(),
            skipped={**self.skipped, **{label: text for label, text in wrong.items() if text}},
            pinned=self.pin,
            decisions=self.decisions,
        )
        return [sample]

    def _wait_for_quiet(self) -> None:
        """Until others leave most of the cores alone; the ranks sleep meanwhile."""
        end = time.monotonic() + self.spec.quiet_s if self.rank == 0 else 0.0
        while time.monotonic() < end:
            before, own, begin = cpu_times(self.cores), time.process_time(), time.monotonic()
            time.sleep(QUIET_LOOK_S)
            spent, took = time.process_time() - own, time.monotonic() - begin
            if shares(before, cpu_times(self.cores), spent, took, len(self.cores))[0] < QUIET_PERCENT:
                break
        self.boot.all_gather(None)

    def _blocks(self, seed: int) -> tuple[dict[str, tuple[list[int], list[int]]], dict[str, str | None]]:
        """Starts and ends in ns of every kept round, by label; what was wrong with outputs."""
        kept: dict[str, tuple[list[int], list[int]]] = {c.label: ([], []) for c in self.contestants}
        wrong: dict[str, str | None] = dict.fromkeys(kept)
        begin = time.monotonic()
        gc.collect()
        gc.disable()
        try:
            for block in range(MAX_BLOCKS):
                for at in blocks.order_of_block(seed, block, len(self.contestants)):
                    contestant = self.contestants[at]
                    bind = self.pin and contestant.pinned
                    with pinned(self.cores[self.rank]) if bind else nullcontext():
                        index, out = self._block(contestant, block, *kept[contestant.label])
                    problem = contestant.wrong(self.inputs, index, out)
                    wrong[contestant.label] = wrong[contestant.label] or problem
                share = (block + 1) / self.spec.min_blocks
                if self.rank == 0:
                    self.progress(min(share, 0.99))
                left = share < 1 or time.monotonic() - begin < self.spec.seconds
                if not self.arena.decide(int(left)):
                    break
        finally:
            gc.enable()
        return kept, wrong

    def _block(
        self, contestant: Contestant, block: int, starts: list[int], ends: list[int]
    ) -> tuple[int, Tensor]:
        barrier, clock = self.arena.barrier, time.monotonic_ns
        for number in range(blocks.ROUNDS):
            index = (block + number) % ROUTING_SETS
            barrier()
            start = clock()
            out = contestant.round(index, touch)
            end = clock()
            if number >= blocks.WARMUP:
                starts.append(start)
                ends.append(end)
        return index, out


def _loudness(samples: list[Sample]) -> float:
    return sum(float(sample.noise["foreign_percent"]) for sample in samples)


def _backend(config: Config) -> Any:
    """The backend whose kernels the strong peers use: the configured one, else the best that is here."""
    for entry in registry.discover():
        if entry.backend is not None and entry.probe.available and config.backend in ("auto", entry.name):
            return entry.backend
    return None
