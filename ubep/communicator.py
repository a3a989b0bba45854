"""What a user holds: a communicator of ranks, and expert-parallel layers on it."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch.distributed as dist

from ubep import registry
from ubep.backend import Backend, Bootstrap, Fabric, ProcessGroupBootstrap, SoloBootstrap
from ubep.config import Config, resolve
from ubep.errors import ClosedError, UbepError
from ubep.expert_parallel import ExpertParallel
from ubep.protocol.plan import Plan, check_equal
from ubep.protocol.planner import make_plan
from ubep.topology import Topology
from ubep.workload import ExpertMap, Workload, dtype_name

logger = logging.getLogger("ubep")


class Communicator:
    """The ranks of a process group, and the backends opened on them.

        with ubep.Communicator(process_group) as comm:
            ep = comm.expert_parallel(num_experts=256, hidden=7168, topk=8, max_tokens=128)

    process_group: default: torch.distributed's default group, made from torchrun's environment if need
        be; without either, a world of a single rank.
    config: default: `ubep.resolve().config`. It must be the same on every rank.
    Constructing layers is collective; closing is not, and may happen in any order, any number of times.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        config: Config | None = None,
        *,
        bootstrap: Bootstrap | None = None,
    ) -> None:
        self.config = config or resolve().config
        self.bootstrap = bootstrap or _default_bootstrap(process_group)
        self.choice: registry.Choice | None = None
        self._fabrics: dict[str, Fabric] = {}
        self._layers: list[ExpertParallel] = []
        self._closed = False

    @property
    def rank(self) -> int:
        return self.bootstrap.rank

    @property
    def world_size(self) -> int:
        return self.bootstrap.world_size

    def expert_parallel(
        self,
        *,
        num_experts: int,
        hidden: int,
        topk: int,
        max_tokens: int,
        dtype: torch.dtype | str = "bfloat16",
        experts: ExpertMap | None = None,
        **semantics: Any,
    ) -> ExpertParallel:
        """A layer that dispatches up to max_tokens tokens of each rank to num_experts experts. Collective.

        dtype: torch dtype or its name.  experts: where each expert lives (default: contiguous blocks).
        semantics: receive_layout, combine, quantise, expert_alignment, expert_capacity, overflow; see
        `Workload`.
        Raises InvalidInputError, UnsupportedError, BackendUnavailableError, CapacityError, or
        PlanMismatchError when ranks disagree; in every case on all ranks, before any memory is allocated.
        """
        if self._closed:
            raise ClosedError("this communicator is closed")
        sizes = {"num_experts": num_experts, "hidden": hidden, "topk": topk, "max_tokens": max_tokens}
        backend, plan = self._agree(sizes, dtype, experts, semantics)
        if backend.name not in self._fabrics:
            options = self.config.options.get(backend.name, {})
            self._fabrics[backend.name] = backend.open(self.bootstrap, options)
        layer, error = None, None
        try:
            layer = ExpertParallel(self._fabrics[backend.name], plan, self.rank, self.config)
        except UbepError as wrong:
            error = wrong
        self._together(error)  # also: nobody writes before every window is ready
        assert layer is not None
        self._layers.append(layer)
        return layer

    def _agree(
        self,
        sizes: dict[str, Any],
        dtype: torch.dtype | str,
        experts: ExpertMap | None,
        semantics: dict[str, Any],
    ) -> tuple[Backend, Plan]:
        """Backend and plan, the same on all ranks, or the same error on all ranks."""
        workload, error = None, None
        try:
            workload = Workload(dtype=dtype_name(dtype), experts=experts, **sizes, **semantics)
        except UbepError as wrong:
            error = wrong
        self._together(error)
        assert workload is not None
        check_equal(self.bootstrap.all_gather({"workload": workload.as_dict(), **_settings(self.config)}))
        self.choice = registry.choose(self.config.backend, workload, self.bootstrap)
        backend = self.choice.backend
        logger.info("backend %s: %s; rejected: %s", backend.name, self.choice.reason, self.choice.rejected)
        topology = self._topology(backend)
        plan = None
        try:
            plan = make_plan(workload, topology, backend.capabilities, self.config.plan_options())
        except UbepError as wrong:
            error = wrong
        self._together(error)
        assert plan is not None
        if len(set(self.bootstrap.all_gather(plan.digest))) > 1:
            check_equal(self.bootstrap.all_gather(plan.as_dict()))
        logger.info("plan %s: %s", plan.digest[:12], dict(plan.decisions))
        return backend, plan

    def _together(self, error: UbepError | None) -> None:
        """If any rank has an error, raise on every rank: the own one, else the first of the others."""
        errors = self.bootstrap.all_gather(None if error is None else (type(error).__name__, str(error)))
        if error is not None:
            raise error
        for rank, other in enumerate(errors):
            if other is not None:
                raise UbepError(f"rank {rank} refused: {other[0]}: {other[1]}")

    def _topology(self, backend: Backend) -> Topology:
        table = self.config.topology
        if table is not None:
            return Topology.from_config(table.model_dump(exclude_none=True), self.world_size)
        return backend.topology(self.bootstrap) or Topology.detect(self.bootstrap)

    def close(self) -> None:
        """Close all layers and fabrics. Idempotent, not collective."""
        self._closed = True
        for layer in self._layers:
            layer.close()
        for fabric in self._fabrics.values():
            fabric.close()
        self._fabrics.clear()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _default_bootstrap(group: dist.ProcessGroup | None) -> Bootstrap:
    if group is not None:
        return ProcessGroupBootstrap(group)
    if "TORCHELASTIC_RUN_ID" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo")
    if dist.is_available() and dist.is_initialized():
        default = dist.group.WORLD
        assert default is not None
        return ProcessGroupBootstrap(default)
    return SoloBootstrap()


def _settings(config: Config) -> dict[str, Any]:
    """The settings that must be the same on every rank."""
    return {"config": config.model_dump(exclude={"timeout_s", "first_timeout_s", "options"})}
