"""The command line: what it prints, what it writes, how it exits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ubep import routing_file
from ubep.errors import ConfigError
from ubep.routing_file import Layer, Routing


def ubep(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command as users do, 200 columns wide."""
    import os

    code = "import sys; from ubep.cli import app; sys.argv[0] = 'ubep'; app()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "200", **environ},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A recorded routing of 40 tokens, with a -1."""
    generator = torch.Generator().manual_seed(0)
    weights, idx = torch.rand(40, 6, generator=generator).topk(2)
    idx[0, 0] = -1
    path = tmp_path / "small.safetensors"
    routing_file.save(path, Routing(6, 2, 16, [Layer(idx, weights)] * 2, "a model", "a text"))
    return path


def test_run_checks_shows_and_writes(small: Path, tmp_path: Path) -> None:
    done = ubep(
        "run",
        "--backend",
        "reference",
        "--ranks",
        "3",
        "--routing",
        str(small),
        "--json",
        "r.json",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "equal" in done.stdout
    assert "Backend reference: asked for" in done.stdout
    assert "not virtual: not asked for" in done.stdout
    figures = json.loads((tmp_path / "r.json").read_text())
    assert figures["passed"] is True
    assert [r["tokens"] for r in figures["ranks"]] == [26, 26, 28]
    assert sum(r["rows"] for r in figures["ranks"]) == 2 * (40 * 2 - 1)
    assert (tmp_path / "ubep-run" / "traffic.png").read_bytes()[:4] == b"\x89PNG"
    trace = json.loads((tmp_path / "ubep-run" / "trace.json").read_text())["traceEvents"]
    assert {e["pid"] for e in trace} == {0, 1, 2}
    assert {"dispatch.Put", "combine.Finish"} <= {e["name"] for e in trace}


def test_run_exits_1_when_the_result_is_wrong(small: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from ubep import moe_job; from ubep.cli import app;"
        "dense = moe_job.reduce_rows;"
        "moe_job.reduce_rows = lambda *rows: dense(*rows) * 1.01;"
        "app()"
    )
    arguments = ["run", "--routing", str(small), "--backend", "virtual", "--ranks", "2"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1, done.stdout
    assert "DIFFERENT" in done.stdout


def test_errors_are_one_line_and_exit_2(tmp_path: Path) -> None:
    done = ubep("run", "--backend", "refrence", cwd=tmp_path)
    assert done.returncode == 2
    assert "did you mean 'reference'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_backends_lists_every_backend(tmp_path: Path) -> None:
    rows = json.loads(ubep("backends", "--json", cwd=tmp_path).stdout)
    assert {"reference", "virtual"} <= {row["name"] for row in rows}
    assert "torch.distributed" in ubep("backends", cwd=tmp_path).stdout


def test_config_shows_value_and_origin(tmp_path: Path) -> None:
    (tmp_path / "ubep.toml").write_text("lanes = 2")
    done = ubep("config", "--json", cwd=tmp_path, UBEP_ORDER="rank")
    values = json.loads(done.stdout)
    assert values["lanes"] == {"value": 2, "from": "ubep.toml"}
    assert values["order"] == {"value": "rank", "from": "environment"}
    assert values["backend"]["from"] == "default"


def test_plan_shows_reasons_and_draws_the_order(tmp_path: Path) -> None:
    done = ubep(
        "plan", "--shape", "node=3,pod=2", "--backend", "reference", "--picture", "o.png", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "links between groups are slower than copies" in done.stdout
    assert (tmp_path / "o.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads(ubep("plan", "--json", "--ranks", "2", cwd=tmp_path).stdout)["lanes"] == 1


@pytest.mark.parametrize("command", [["--help"], ["run", "--help"], ["plan", "--help"], ["--version"]])
def test_help_works_everywhere(command: list[str], tmp_path: Path) -> None:
    assert ubep(*command, cwd=tmp_path).returncode == 0


def test_routing_comes_back_from_its_file(small: Path) -> None:
    routing = routing_file.load(small)
    assert (routing.num_experts, routing.topk, routing.hidden) == (6, 2, 16)
    assert (routing.model, routing.text) == ("a model", "a text")
    assert routing.layers[0].topk_idx.dtype == torch.int64
    assert int(routing.layers[0].topk_idx[0, 0]) == -1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_experts": 3}, r"layer0.topk_idx holds ids -1 to 5, allowed are -1 to 2"),
        ({"topk": 4}, r"layer0.topk_idx is \[40, 2\], must be \[tokens, 4\]"),
        ({"layers": []}, "no tensor 'layer0.topk_idx'"),
    ],
)
def test_a_wrong_routing_file_names_the_file_and_the_fault(small: Path, change: dict, says: str) -> None:  # type: ignore[type-arg]
    from dataclasses import replace

    wrong = replace(routing_file.load(small), **change)
    routing_file.save(small, wrong)
    with pytest.raises(ConfigError, match=says) as caught:
        routing_file.load(small)
    assert "small.safetensors" in str(caught.value)


def test_a_file_that_is_no_routing_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="cannot read"):
        routing_file.load(path)
