"""The examples run, and say themselves whether they are right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_training_over_ranks_has_the_losses_of_one_process(tmp_path: Path) -> None:
    """Uneven shares: 5 sequences over 3 ranks. Exit status 1 if the losses differ."""
    arguments = ["--ranks", "3", "--batch-size", "5", "--steps", "6", "--check", "--record", "r.safetensors"]
    done = subprocess.run(
        [sys.executable, EXAMPLES / "train_moe.py", *arguments, "--record-tokens", "256"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal" in done.stdout
    assert (tmp_path / "r.safetensors").exists()
