"""The ablation on an emulated link: ubep against itself, with one part of the protocol after another."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from ubep.bench.contestants import Variant
from ubep.config import Config
from ubep.errors import ConfigError

CHUNK_RECORDS = 16
WHOLE = 10**6  # records: more than any message has
BASE = "whole, barrier, rank order"


def read(path: Path) -> dict[str, Any]:
    """The link's table, as the backends' option `link` takes it. Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the link {path}: {error}") from None


def variants(config: Config, backend: str, link: dict[str, Any]) -> tuple[Variant, ...]:
    """Each adds to the one before; the first is the base: bulk-synchronous, as plain collectives are."""
    steps: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("whole, flags, rank order", {}, {}),
        ("chunked, rank order", {"chunk_records": CHUNK_RECORDS}, {}),
        ("chunked, rotated", {"order": "rotated"}, {}),
        ("chunked, tiered", {"order": "tiered"}, {}),
        ("+ deduplicate", {"deduplicate": True}, {}),
        ("+ int8", {}, {"quantise": "int8"}),
    ]
    settings: dict[str, Any] = {
        "backend": backend,
        "placement": "staged",
        "deduplicate": False,
        "order": "rank",
        "chunk_records": WHOLE,
    }
    made = [Variant(BASE, {**settings, **_link(config, backend, {**link, "bulk_synchronous": True})})]
    semantics: dict[str, Any] = {}
    for label, change, meaning in steps:
        settings, semantics = {**settings, **change}, {**semantics, **meaning}
        made.append(Variant(label, {**settings, **_link(config, backend, link)}, semantics))
    return tuple(made)


def _link(config: Config, backend: str, link: dict[str, Any]) -> dict[str, Any]:
    own = {**config.options.get(backend, {}), "link": link}
    return {"options": {**config.options, backend: own}}
