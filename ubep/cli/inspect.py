"""`ubep backends`, `ubep plan`, `ubep config`: look before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ubep import plots, registry
from ubep.config import Config, resolve
from ubep.errors import BackendUnavailableError
from ubep.protocol.order import send_steps
from ubep.protocol.plan import Plan, flatten
from ubep.protocol.planner import make_plan
from ubep.topology import Topology
from ubep.workload import Workload

TIER_STYLES = ("dim", "green", "yellow", "red", "magenta", "blue")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def backends(as_json: AsJson = False) -> None:
    """List installed backends, best first, and why each can or cannot run here."""
    entries = registry.discover()
    if as_json:
        rows = [{"name": e.name, **vars(e.probe), "versions": dict(e.probe.versions)} for e in entries]
        print(json.dumps(rows, indent=2))
        return
    table = Table("backend", "available", "why", "versions", "fix")
    for entry in entries:
        probe = entry.probe
        mark = "[green]yes[/]" if probe.available else "[red]no[/]"
        versions = ", ".join(f"{name} {version}" for name, version in probe.versions.items())
        table.add_row(entry.name, mark, probe.reason, versions, probe.fix)
    Console().print(table)


def config(as_json: AsJson = False) -> None:
    """Show every setting, its value, and where the value comes from."""
    resolved = resolve()
    values = resolved.config.model_dump(mode="json")
    if as_json:
        print(
            json.dumps(
                {key: {"value": values[key], "from": resolved.origin[key]} for key in values}, indent=2
            )
        )
        return
    table = Table("setting", "value", "from", "meaning")
    for key, value in values.items():
        table.add_row(key, json.dumps(value), resolved.origin[key], Config.model_fields[key].description)
    Console().print(table)


def plan(
    ranks: Annotated[int, typer.Option(min=1, help="World size (ignored with a [topology] shape).")] = 8,
    experts: Annotated[int, typer.Option(help="Experts in all.")] = 256,
    hidden: Annotated[int, typer.Option(help="Columns of a token.")] = 7168,
    topk: Annotated[int, typer.Option(help="Experts of a token.")] = 8,
    tokens: Annotated[int, typer.Option(help="Most tokens of a rank in one call.")] = 128,
    shape: Annotated[str | None, typer.Option(help="Tiers, near to far: 'node=4,pod=2'.")] = None,
    backend: Annotated[str | None, typer.Option(help="Plan for this backend's capabilities.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the send order into this PNG.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the plan: every choice with its reason, memory, and the send order by tier.

    Example:  ubep plan --shape node=4,pod=3 --picture order.png
    """
    settings = resolve({"backend": backend} if backend else {}).config
    made = _make(settings, Workload(experts, hidden, topk, tokens), _topology(settings, ranks, shape))
    if as_json:
        print(made.to_json())
    else:
        _show(Console(), made)
    if picture is not None:
        plots.order_picture(picture, made)
        Console(stderr=True).print(f"Send order drawn into {picture}", soft_wrap=True)


def _topology(settings: Config, ranks: int, shape: str | None) -> Topology:
    if shape is not None:
        try:
            return Topology.regular(
                {name: int(size) for name, size in (p.split("=") for p in shape.split(","))}
            )
        except ValueError:
            raise typer.BadParameter(f"{shape!r} is not like 'node=4,pod=2'", param_hint="--shape") from None
    if settings.topology is not None:
        return Topology.from_config(settings.topology.model_dump(exclude_none=True))
    return Topology.flat(ranks)


def _make(settings: Config, workload: Workload, topology: Topology) -> Plan:
    for entry in registry.discover():
        usable = entry.backend is not None and (entry.probe.available or settings.backend == entry.name)
        if usable and settings.backend in ("auto", entry.name):
            assert entry.backend is not None
            return make_plan(workload, topology, entry.backend.capabilities, settings.plan_options())
    raise BackendUnavailableError(f"backend {settings.backend!r} is not installed; see `ubep backends`")


def _show(console: Console, made: Plan) -> None:
    table = Table("field", "value", "why", title=f"plan {made.digest[:12]}")
    plain: dict[str, Any] = flatten(made.as_dict())
    for key, value in plain.items():
        if not key.startswith(("topology.coords", "experts.")):
            table.add_row(key, str(value), made.decisions.get(key, ""))
    counting, sending = made.roles
    table.add_row(
        "roles", f"{counting} counting, {sending} sending", "cost model" if made.workers > 1 else ""
    )
    table.add_row("window", f"{made.window_bytes / 2**20:.1f} MiB a rank", f"{made.lanes} lanes, 2 parities")
    console.print(table)
    order = Table(title=f"send order ({made.order}): destination in each step, coloured by tier")
    order.add_column("rank", justify="right")
    rows = [send_steps(made.topology, rank, made.order) for rank in range(made.world_size)]
    for step in range(len(rows[0])):
        order.add_column(str(step), justify="right")
    for rank, row in enumerate(rows):
        order.add_row(str(rank), *(_cell(made, rank, dst) for dst in row))
    console.print(order)
    legend = (f"[{TIER_STYLES[i % len(TIER_STYLES)]}]{n}[/]" for i, n in enumerate(made.topology.tier_names))
    console.print("tiers:", *legend)


def _cell(made: Plan, rank: int, dst: int) -> str:
    if dst < 0:
        return "·"
    return f"[{TIER_STYLES[made.topology.tier(rank, dst) % len(TIER_STYLES)]}]{dst}[/]"
