"""One typed configuration: arguments, then UBEP_* variables, then ubep.toml, then defaults."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from ubep.capabilities import Placement, Signalling
from ubep.errors import ConfigError
from ubep.protocol.order import SendOrder
from ubep.protocol.planner import PlanOptions

FILE_NAME = "ubep.toml"
PREFIX = "UBEP_"
FILE_VARIABLE = "UBEP_CONFIG"
NOT_SETTINGS = {FILE_VARIABLE, "UBEP_LOG"}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TopologyConfig(_Strict):
    """Where ranks are. Either `shape` (equal groups) or `groups` (any), tiers from near to far."""

    shape: dict[str, PositiveInt] | None = Field(
        None, description="fan-out of each tier: {node = 8, pod = 4}"
    )
    groups: dict[str, list[int]] | None = Field(
        None, description="group id of every rank: {node = [0, 0, 1]}"
    )
    outermost: str = Field("pod", description="with groups: name of the tier that holds every rank")

    @model_validator(mode="after")
    def _one_of(self) -> TopologyConfig:
        if (self.shape is None) == (self.groups is None):
            raise ValueError("give either shape or groups")
        return self


class Config(_Strict):
    """Everything that can be configured. `ubep config` shows each value and where it came from."""

    backend: str = Field("auto", description="name of an installed backend, or auto")
    placement: Placement | Literal["auto"] = Field(
        "auto", description="slots (staged) or final rows (direct)"
    )
    deduplicate: bool | Literal["auto"] = Field("auto", description="a token travels once to a rank")
    signalling: Signalling | Literal["auto"] = Field("auto", description="how completion travels")
    order: SendOrder = Field("tiered", description="sequence in which a rank serves its peers")
    chunk_records: PositiveInt | dict[str, PositiveInt] = Field(
        default_factory=dict, description="records flagged together, for all tiers or by tier name"
    )
    workers: PositiveInt = Field(1, description="workers of each rank, split by role")
    lanes: PositiveInt = Field(1, description="operations that can be in flight on one layer")
    checked: bool = Field(
        True, description="no row moves before every rank has accepted its input; NaN weights are refused"
    )
    fused: bool = Field(True, description="use a backend's fused kernels where it has them, else the driver")
    timeout_s: float = Field(30.0, gt=0, description="deadline of an operation, in seconds")
    first_timeout_s: float = Field(120.0, gt=0, description="deadline of a layer's first operation")
    topology: TopologyConfig | None = Field(None, description="where ranks are; else environment, host names")
    options: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="tables of the backends' own options, by backend name"
    )

    def plan_options(self) -> PlanOptions:
        """The part that the planner reads."""
        return PlanOptions(
            placement=self.placement,
            deduplicate=self.deduplicate,
            signalling=self.signalling,
            order=self.order,
            chunk_records=self.chunk_records,
            workers=self.workers,
            lanes=self.lanes,
            checked=self.checked,
        )


@dataclass(frozen=True)
class Resolved:
    """A configuration, and the source of each value by key."""

    config: Config
    origin: dict[str, str]


def resolve(
    arguments: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Resolved:
    """Merge all sources. Raises ConfigError naming the source, the key and the allowed values.

    file: default is $UBEP_CONFIG, else ubep.toml in the working directory if there is one.
    """
    environ = os.environ if environ is None else environ
    sources: list[tuple[str, Mapping[str, Any]]] = [("argument", arguments or {})]
    sources.append(("environment", _from_environment(environ)))
    named = file or (Path(environ[FILE_VARIABLE]) if FILE_VARIABLE in environ else None)
    if named is not None or Path(FILE_NAME).is_file():
        path = named or Path(FILE_NAME)
        sources.append((str(path), _from_file(path)))
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for source, table in sources:
        for key, value in table.items():
            if key not in Config.model_fields:
                raise ConfigError(_unknown_key(source, key))
            if key not in values:
                values[key] = value
                origin[key] = source
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error, origin)) from None
    return Resolved(config, {key: origin.get(key, "default") for key in Config.model_fields})


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, text in environ.items():
        if name.startswith(PREFIX) and name not in NOT_SETTINGS:
            try:
                values[name.removeprefix(PREFIX).lower()] = json.loads(text)
            except ValueError:
                values[name.removeprefix(PREFIX).lower()] = text
    return values


def _from_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def _unknown_key(source: str, key: str) -> str:
    shown = PREFIX + key.upper() if source == "environment" else key
    near = difflib.get_close_matches(key, Config.model_fields, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{source}: unknown key {shown!r}{hint} Allowed: {', '.join(Config.model_fields)}"


def _explain(error: ValidationError, origin: Mapping[str, str]) -> str:
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        source = origin.get(str(problem["loc"][0]), "argument") if problem["loc"] else "argument"
        lines.append(f"{source}: {key} = {problem['input']!r}: {problem['msg']}")
    return "; ".join(lines)
