"""The command line: arguments in, exit code out.

Law: no option takes a secret (a command line is readable by everyone on the machine), nothing that a user can cause
ends in a traceback, and nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.exceptions import TyperException

from sidecar import __version__, compiled

if TYPE_CHECKING:
    from sidecar.config import Settings

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
_EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it

app = typer.Typer(
    name="hermes-sidecar",
    help="Keeps chat conversations together between any frontend and a Hermes or OpenAI-compatible gateway.",
    epilog="Without a command it serves. Secrets are read from files and the environment, never from options.",
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and give its exit code."""
    try:
        code = typer.main.get_command(app)(arguments, prog_name="hermes-sidecar", standalone_mode=False)
        sys.stdout.flush()
    except TyperException as exc:
        _complain(f"{exc.format_message()} (hermes-sidecar --help shows what there is)")
        return EXIT_USAGE
    except typer.Abort:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`… | head`). Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return code if isinstance(code, int) else EXIT_OK


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="The TOML file to read. Default: $HERMES_SIDECAR_CONFIG, $XDG_CONFIG_HOME/hermes-sidecar/sidecar.toml,"
        " /etc/hermes-sidecar/sidecar.toml, else defaults.",
    ),
]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hermes-sidecar {__version__} ({'compiled' if compiled.modules() else 'pure Python'})")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _no_command(
    context: typer.Context,
    config: ConfigOption = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> int:
    context.obj = config
    return serve(context) if context.invoked_subcommand is None else EXIT_OK


@app.command()
def serve(context: typer.Context, config: ConfigOption = None) -> int:
    """Run the proxy in the foreground until it is told to stop."""
    settings = _settings(context, config)
    from sidecar.process import serve as run

    return run(settings)


@app.command()
def check(context: typer.Context, config: ConfigOption = None) -> int:
    """Read the configuration, and print what is in effect or what is wrong with it."""
    settings = _settings(context, config)
    from sidecar.config import describe

    typer.echo(describe(settings), nl=False)
    return EXIT_OK


@app.command()
def probe(
    context: typer.Context,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document that /capabilities answers.")] = False,
) -> int:
    """Ask the backend once what it can do, and what would unlock the rest. Costs no token; 0 if chat is usable."""
    settings = _settings(context, config)
    from sidecar import commands

    return commands.probe(settings, as_json=as_json)


@app.command()
def verify(
    context: typer.Context,
    config: ConfigOption = None,
    rotation: Annotated[
        bool,
        typer.Option(
            "--rotation",
            help="Prove instead that a conversation is followed when the gateway moves it to a new session: up to 26 "
            "turns of 40 kB, which cost what they cost.",
        ),
    ] = False,
) -> int:
    """Prove on the real chat path that two turns of one conversation land in one session.

    Asks the sidecar that runs at the configured address, or starts one for the check. The turns are real: the
    gateway's agent answers them.
    """
    settings = _settings(context, config)
    from sidecar import commands

    return commands.verify(settings, rotation=rotation)


@app.command()
def demo(
    context: typer.Context,
    config: ConfigOption = None,
    once: Annotated[bool, typer.Option("--once", help="Exit after the check instead of going on serving.")] = False,
) -> int:
    """Try it without a gateway: a small demo gateway, the sidecar in front, the check, and URLs to open."""
    settings = _settings(context, config)
    from sidecar import commands

    return commands.demo(settings, once=once)


def _settings(context: typer.Context, config: Path | None) -> Settings:
    """The checked settings; faults go to stderr, a line each, and end the command. The command's --config wins."""
    from sidecar.config import ConfigFaults, load

    try:
        return load(config or context.obj)
    except ConfigFaults as exc:
        for fault in exc.faults:
            _complain(fault)
        raise typer.Exit(EXIT_USAGE) from exc


def _complain(line: str) -> None:
    typer.echo(f"hermes-sidecar: {line}", err=True)
