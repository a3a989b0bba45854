"""The `ubep` command."""

from ubep.cli.main import app

__all__ = ["app"]
