"""Makes a plan: fills in every automatic choice from capabilities, sizes and topology, and says why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ubep.capabilities import Capabilities, Placement, Signalling
from ubep.errors import ConfigError, UnsupportedError
from ubep.protocol.chunking import DEFAULT_LINKS, UNKNOWN_LINK, chunk_records
from ubep.protocol.order import SendOrder
from ubep.protocol.plan import Plan
from ubep.protocol.records import combine_format, dispatch_format
from ubep.topology import Topology
from ubep.workload import ExpertMap, Workload

# Sending a token once to a rank pays where it spares this share of the rows. Measured on host memory:
# 4 ranks (45 % of the rows left of top-8) gain, 8 ranks (66 %) gain and lose by size.
DEDUPLICATE_BELOW = 0.6
# And small rows are better off in slots, once each, than at their places, where it spares this share:
# 2 ranks (25 % left of top-8) gain, 4 ranks lose.
STAGE_BELOW = 0.3


@dataclass(frozen=True)
class PlanOptions:
    """What the user asked for; "auto" leaves the choice to the planner. Fields as in Plan."""

    placement: Placement | Literal["auto"] = "auto"
    deduplicate: bool | Literal["auto"] = "auto"
    signalling: Signalling | Literal["auto"] = "auto"
    order: SendOrder = "tiered"
    chunk_records: int | Mapping[str, int] = field(default_factory=dict)
    workers: int = 1
    lanes: int = 1
    checked: bool = True


def expected_distinct_ranks(world_size: int, topk: int) -> float:
    """Expected number of distinct ranks among `topk` independent uniform picks: R (1 - (1 - 1/R)^K)."""
    return world_size * (1 - (1 - 1 / world_size) ** topk)


def make_plan(
    workload: Workload,
    topology: Topology,
    capabilities: Capabilities | None = None,
    options: PlanOptions | None = None,
) -> Plan:
    """The plan for a workload. Raises UnsupportedError or ConfigError when it cannot be carried out."""
    capabilities = capabilities or Capabilities()
    options = options or PlanOptions()
    world_size = topology.world_size
    refusal = capabilities.refusal(workload, world_size)
    if refusal:
        raise UnsupportedError(*refusal)
    experts = workload.experts or ExpertMap.contiguous(workload.num_experts, world_size)
    stray = [rank for rank in experts.rank_of if not 0 <= rank < world_size]
    if stray:
        raise ConfigError(f"the expert map names rank {stray[0]}, world size is {world_size}")
    if options.workers > capabilities.max_workers:
        raise UnsupportedError(
            "max_workers", f"workers {options.workers} is above the limit {capabilities.max_workers}"
        )
    decisions: dict[str, str] = {}
    placement = _placement(options, workload, world_size, capabilities, decisions)
    deduplicate = _deduplicate(options, workload, topology, placement, decisions)
    signalling = _signalling(options, capabilities, decisions)
    if placement == "direct" and signalling != "word":
        raise UnsupportedError("placements", f"direct placement needs word signalling, not {signalling}")
    if placement == "direct" and workload.overflow == "drop" and workload.expert_capacity is not None:
        raise UnsupportedError("placements", "direct placement cannot drop rows; use placement staged")
    return Plan(
        topology=topology,
        workload=workload,
        experts=experts,
        placement=placement,
        transfer="pull" if placement == "direct" and capabilities.get else "push",
        deduplicate=deduplicate,
        signalling=signalling,
        atomic_block=capabilities.atomic_block,
        flag_stride=capabilities.flag_stride,
        ordered=capabilities.ordered,
        order=options.order,
        chunk_records=_chunks(options, workload, topology, capabilities, deduplicate, decisions),
        workers=options.workers,
        lanes=options.lanes,
        checked=options.checked,
        decisions=decisions,
    )


def _placement(
    options: PlanOptions,
    workload: Workload,
    world_size: int,
    capabilities: Capabilities,
    decisions: dict[str, str],
) -> Placement:
    if options.placement == "auto":
        obstacle = _against_direct(options, workload, capabilities, world_size)
        choice = next(
            (p for p in capabilities.placements if p != "direct" or not obstacle), capabilities.placements[0]
        )
        reason = "what the backend prefers" if choice == capabilities.placements[0] else obstacle
        decisions["placement"] = f"{choice}: {reason}"
        return choice
    if options.placement not in capabilities.placements:
        raise UnsupportedError(
            "placements",
            f"placement {options.placement} is not one of {', '.join(capabilities.placements)}",
        )
    decisions["placement"] = f"{options.placement}: asked for"
    return options.placement


def _against_direct(
    options: PlanOptions, workload: Workload, capabilities: Capabilities, world_size: int
) -> str:
    """Why direct placement cannot carry what was asked for, or is not the faster one, or ""."""
    if workload.overflow == "drop" and workload.expert_capacity is not None:
        return "direct placement cannot drop rows"
    if options.deduplicate is True and workload.receive_layout == "token-expert":
        return "deduplicate was asked for, direct placement moves each row to its own place"
    if options.signalling not in ("auto", "word") or "word" not in capabilities.signalling():
        return "direct placement needs word signalling"
    nbytes = workload.max_tokens * workload.topk * workload.hidden * workload.torch_dtype.itemsize
    share = expected_distinct_ranks(world_size, workload.topk) / workload.topk
    if options.deduplicate is not False and share <= STAGE_BELOW and nbytes <= capabilities.staged_up_to:
        return (
            f"{nbytes} bytes a rank, up to {capabilities.staged_up_to} slots with deduplication are faster "
            f"where a token's experts lie on {share:.0%} as many ranks, limit {STAGE_BELOW:.0%}"
        )
    return ""


def _deduplicate(
    options: PlanOptions,
    workload: Workload,
    topology: Topology,
    placement: Placement,
    decisions: dict[str, str],
) -> bool:
    if workload.receive_layout == "token-rank":
        choice, reason = True, "the token-rank layout has one row for each token and rank"
    elif placement == "direct":
        if options.deduplicate is True:
            raise ConfigError("deduplicate needs placement staged: direct moves each row to its own place")
        choice, reason = False, "direct placement moves each row to its own place"
    elif options.deduplicate != "auto":
        choice, reason = options.deduplicate, "asked for"
    else:
        share = expected_distinct_ranks(topology.world_size, workload.topk) / workload.topk
        far = len(topology.tiers) > 1
        choice = share < (1.0 if far else DEDUPLICATE_BELOW)
        reason = f"a token's {workload.topk} experts lie on {share:.0%} as many ranks" + (
            ", and links between groups are slower than copies" if far else f", limit {DEDUPLICATE_BELOW:.0%}"
        )
    decisions["deduplicate"] = f"{choice}: {reason}"
    return choice


def _signalling(options: PlanOptions, capabilities: Capabilities, decisions: dict[str, str]) -> Signalling:
    sound = capabilities.signalling()
    if options.signalling == "auto":
        decisions["signalling"] = f"{sound[0]}: the first that is sound on this transport"
        return sound[0]
    if options.signalling not in sound:
        capability = "release" if options.signalling == "word" else "atomic_block"
        raise UnsupportedError(
            capability,
            f"signalling {options.signalling} needs {capability}, which the backend does not declare; "
            f"sound here: {', '.join(sound)}",
        )
    decisions["signalling"] = f"{options.signalling}: asked for"
    return options.signalling


def _chunks(
    options: PlanOptions,
    workload: Workload,
    topology: Topology,
    capabilities: Capabilities,
    deduplicate: bool,
    decisions: dict[str, str],
) -> tuple[int, ...]:
    names = topology.tier_names
    asked = options.chunk_records
    if isinstance(asked, int):
        asked = dict.fromkeys(names, asked)
    unknown = set(asked) - set(names)
    if unknown:
        raise ConfigError(f"chunk_records names tier {min(unknown)!r}; the tiers are {', '.join(names)}")
    wrong = [f"{name} = {size}" for name, size in asked.items() if size < 1]
    if wrong:
        raise ConfigError(f"chunk_records must be at least 1: {', '.join(wrong)}")
    entries = workload.topk if deduplicate else 1
    max_records = workload.max_tokens * workload.topk // entries
    expected = max_records / topology.world_size
    record = max(dispatch_format(workload, entries).nbytes, combine_format(workload, entries).nbytes)
    links = {**DEFAULT_LINKS, **capabilities.links}
    best = {
        name: asked.get(name) or chunk_records(expected, record, max_records, links.get(name, UNKNOWN_LINK))
        for name in names
    }
    decisions["chunk_records"] = ", ".join(
        f"{name} {size} ({'asked for' if name in asked else 'latency-bandwidth optimum'})"
        for name, size in best.items()
    )
    return tuple(min(best[name], max_records) for name in names)
