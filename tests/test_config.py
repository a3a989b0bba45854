"""Configuration: precedence, origins, and errors that name source, key and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ubep.config import Config, resolve
from ubep.errors import ConfigError


def test_arguments_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "ubep.toml"
    file.write_text('backend = "a"\norder = "rank"\nlanes = 2\n')
    resolved = resolve({"backend": "c"}, environ={"UBEP_BACKEND": "b", "UBEP_ORDER": "rotated"}, file=file)
    assert (resolved.config.backend, resolved.config.order, resolved.config.lanes) == ("c", "rotated", 2)
    assert resolved.origin["backend"] == "argument"
    assert resolved.origin["order"] == "environment"
    assert resolved.origin["lanes"] == str(file)
    assert resolved.origin["workers"] == "default"


def test_a_file_in_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ubep.toml").write_text("workers = 3")
    monkeypatch.chdir(tmp_path)
    assert resolve(environ={}).config.workers == 3


def test_variables_may_hold_json() -> None:
    environ = {"UBEP_CHECKED": "false", "UBEP_CHUNK_RECORDS": '{"node": 8}', "UBEP_LOG": "debug"}
    config = resolve(environ=environ).config
    assert config.checked is False
    assert config.chunk_records == {"node": 8}


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        (
            {"UBEP_BACKED": "shm"},
            r"environment: unknown key 'UBEP_BACKED'; did you mean 'backend'\? Allowed: backend",
        ),
        ({"UBEP_ORDER": "random"}, "environment: order = 'random': Input should be 'tiered', 'near-first'"),
        ({"UBEP_LANES": "0"}, "environment: lanes = 0: Input should be greater than 0"),
        ({"UBEP_TOPOLOGY": "{}"}, "topology = {}: Value error, give either shape or groups"),
        ({"UBEP_TIMEOUT_S": "-1"}, "timeout_s = -1: Input should be greater than 0"),
    ],
)
def test_wrong_variables_are_errors(environ: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve(environ=environ)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ordr = 1", "unknown key 'ordr'; did you mean 'order'"),
        ('placement = "anywhere"', "placement.* = 'anywhere': Input should be 'staged' or 'direct'"),
        ("[topology]\nshape = {node = 0}", r"topology.shape.node = 0: Input should be greater than 0"),
        ("not toml", "cannot read"),
    ],
)
def test_wrong_files_are_errors_that_name_the_file(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "my.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        resolve(environ={}, file=file)
    assert "my.toml" in str(caught.value)


def test_a_named_file_that_is_missing_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot read nowhere\.toml"):
        resolve(environ={"UBEP_CONFIG": "nowhere.toml"})


def test_every_setting_has_a_meaning_and_a_default() -> None:
    for name, field in Config.model_fields.items():
        assert field.description, name
        assert not field.is_required(), name
