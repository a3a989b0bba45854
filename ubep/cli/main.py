"""The application: its commands, and how errors are shown."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from ubep import __version__
from ubep.bench import cli as bench
from ubep.cli import inspect, run
from ubep.errors import UbepError


class _App(typer.Typer):
    """Shows ubep's errors as one line with exit status 2 instead of a traceback."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        try:
            return super().__call__(*args, **kwargs)
        except UbepError as error:
            Console(stderr=True, soft_wrap=True).print(f"[bold red]{type(error).__name__}:[/] ", end="")
            print(error, file=sys.stderr)
            raise SystemExit(2) from None


app = _App(
    help="Expert-parallel dispatch and combine on any hardware that can write into a peer's memory.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command("run")(run.run)
app.command("bench")(bench.bench)
app.command("backends")(inspect.backends)
app.command("plan")(inspect.plan)
app.command("config")(inspect.config)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show it and exit."
    ),
) -> None:
    """Expert-parallel dispatch and combine on any hardware that can write into a peer's memory."""
