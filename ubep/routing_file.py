"""Recorded routing: a safetensors file with the experts that a router chose. See docs/routing-format.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ubep.errors import ConfigError

FORMAT = "ubep-routing"
VERSION = "1"
DEFAULT = Path(str(files("ubep") / "data" / "routing_small_moe.safetensors"))


@dataclass(frozen=True)
class Layer:
    """One MoE layer's routing: topk_idx int64 [T, K] (-1: none), topk_weights float32 [T, K]."""

    topk_idx: Tensor
    topk_weights: Tensor


@dataclass(frozen=True)
class Routing:
    """Layers that share num_experts, topk and hidden.  model, text: where the routing comes from."""

    num_experts: int
    topk: int
    hidden: int
    layers: Sequence[Layer]
    model: str = ""
    text: str = ""


def save(path: Path, routing: Routing) -> None:
    """Write a file; ids as int16 where they fit, weights as float16."""
    narrow = torch.int16 if routing.num_experts <= torch.iinfo(torch.int16).max else torch.int32
    tensors = {}
    for index, layer in enumerate(routing.layers):
        tensors[f"layer{index}.topk_idx"] = layer.topk_idx.to(narrow).contiguous()
        tensors[f"layer{index}.topk_weights"] = layer.topk_weights.to(torch.float16).contiguous()
    facts = {name: str(getattr(routing, name)) for name in ("num_experts", "topk", "hidden", "model", "text")}
    save_file(tensors, path, {"format": FORMAT, "version": VERSION, **facts})


def load(path: Path) -> Routing:
    """Read a file. Raises ConfigError naming the file and what is wrong with it."""
    try:
        with safe_open(path, "pt") as file:
            facts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if (facts.get("format"), facts.get("version")) != (FORMAT, VERSION):
        found = f"format {facts.get('format')!r} version {facts.get('version')!r}"
        raise ConfigError(f"{path}: {found}, expected {FORMAT!r} version {VERSION!r}")
    try:
        experts, topk, hidden = (int(facts[key]) for key in ("num_experts", "topk", "hidden"))
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"{path}: metadata num_experts, topk and hidden must be integers: {error}"
        ) from None
    layers: list[Layer] = []
    while f"layer{len(layers)}.topk_idx" in tensors:
        layers.append(_layer(path, f"layer{len(layers)}", tensors, experts, topk))
    if not layers:
        raise ConfigError(f"{path}: no tensor 'layer0.topk_idx'")
    return Routing(experts, topk, hidden, layers, facts.get("model", ""), facts.get("text", ""))


def _layer(path: Path, name: str, tensors: dict[str, Tensor], experts: int, topk: int) -> Layer:
    idx = tensors[f"{name}.topk_idx"].to(torch.int64)
    weights = tensors.get(f"{name}.topk_weights")
    if idx.dim() != 2 or idx.shape[1] != topk:
        raise ConfigError(f"{path}: {name}.topk_idx is {list(idx.shape)}, must be [tokens, {topk}]")
    if weights is None or weights.shape != idx.shape:
        found = None if weights is None else list(weights.shape)
        raise ConfigError(f"{path}: {name}.topk_weights is {found}, must be {list(idx.shape)}")
    if idx.numel() and (int(idx.min()) < -1 or int(idx.max()) >= experts):
        raise ConfigError(
            f"{path}: {name}.topk_idx holds ids {int(idx.min())} to {int(idx.max())}, "
            f"allowed are -1 to {experts - 1}"
        )
    return Layer(idx, weights.to(torch.float32))
