"""The command line: parses, calls, prints. Results on stdout, everything else on stderr."""

import errno
import os
import signal
import sys
import traceback
import warnings
from io import TextIOWrapper
from typing import Any, NoReturn

import click

from kvsearch.errors import ExtensionWarning, KvsearchError, nearest, one_line, quoted

# Threads that wait for each other spin for a moment and then sleep, which leaves the core to other
# work (studies/2026-11-busy-machine). Read by GNU's OpenMP when torch is loaded: not yet, here.
WAITING = {"GOMP_SPINCOUNT": "1000"}

COMMANDS = {
    "run": "search, choose and report: the main job",
    "need": "what the cache of a model takes, and whether it has to be smaller",
    "init": "write a configuration file for run",
    "eval": "measure methods and policy files on a text or on prompts",
    "report": "rebuild the report of a run",
    "export": "write a policy for a runtime",
    "verify": "whether a running server really has a policy, by its log-probabilities",
    "push": "share a policy with a card of its figures",
    "targets": "the runtimes, what they can execute, and the level of proof",
    "prune": "write a smaller model without the channels that a policy removes",
    "adapt": "train a model to live with a policy, or without the channels it removes",
    "bench": "decode speed of a policy against the full cache",
    "check": "test every kernel on this machine",
    "tasks": "the prompts that run and eval take by name: needle, qa, ruler, ...",
    "lm-eval": "tasks of lm-evaluation-harness under a policy",
    "heads": "measure what every KV head of a model loses, once",
    "methods": "the published methods as points of the space",
    "study": "check that a kept study's tables follow from its records",
    "validate": "check policy and space files",
    "schema": "the JSON schema of a policy file",
}
_show = warnings.showwarning
STOPS = (signal.SIGINT, signal.SIGTERM)  # from people, and from schedulers and containers
FULL = (errno.ENOSPC, errno.EDQUOT)
RESUME = ("run", "adapt")  # commands that go on where they were interrupted


def module_of(name: str) -> str:
    """The module with a command."""
    return f"kvsearch.cli.{name.replace('-', '_')}"


class Lazy(click.Group):
    """Imports a command's module when it is called, so that `--help` is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, in the order of a user's first steps."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command called `cmd_name`."""
        if cmd_name not in COMMANDS:
            raise click.UsageError(
                f"unknown command {quoted(cmd_name)}{nearest(cmd_name, COMMANDS)}"
            )
        from importlib import import_module

        command: click.Command = import_module(module_of(cmd_name)).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvsearch")
def cli() -> None:
    """Find the KV-cache policy for your model, your prompts or text, and your memory.

    Start with: kvsearch run --budget 256
    """


def main(argv: list[str] | None = None) -> None:
    """Entry point; exit codes: 0 done, 1 a bug, 2 mendable by the user, 130 interrupted."""
    args = sys.argv[1:] if argv is None else argv
    debug = "--debug" in args
    args = [a for a in args if a != "--debug"]
    if isinstance(sys.stdout, TextIOWrapper):  # whose encoding may lack letters of a file's name
        sys.stdout.reconfigure(errors="backslashreplace")
    before = {number: signal.signal(number, _interrupt) for number in STOPS}
    warnings.showwarning = _warn
    for name, value in WAITING.items():
        os.environ.setdefault(name, value)
    try:
        code: Any = cli.main(args=args, prog_name="kvsearch", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except (click.exceptions.Abort, KeyboardInterrupt) as e:  # click makes the first of the second
        if isinstance(e.__cause__, EOFError):  # and of this, which nobody's Ctrl-C raised
            _bug(e.__cause__, debug)
        resumes = args[:1] in [[name] for name in RESUME]
        hint = "; the same command goes on from here" if resumes else ""
        click.echo(f"interrupted{hint}", err=True)
        sys.exit(130)
    except (click.ClickException, KvsearchError) as e:
        if debug:
            traceback.print_exc()
        text = e.format_message() if isinstance(e, click.ClickException) else str(e)
        click.echo(f"kvsearch: {one_line(text)}", err=True)
        sys.exit(2)
    except Exception as e:
        if debug:
            traceback.print_exc()
        if isinstance(e, OSError) and e.errno in FULL:  # such as that of stdout
            why = f"{e.strerror}; free some space and run the same command again"
            click.echo(f"kvsearch: {why}", err=True)
            sys.exit(2)
        _bug(e, debug=False)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _warn(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """A sentence about another package is for people; other warnings are as Python shows them."""
    if issubclass(category, ExtensionWarning):
        click.echo(f"kvsearch: {message}", err=True)
    else:
        _show(message, category, *where, **more)


def _bug(error: BaseException, debug: bool) -> NoReturn:
    """Say what should not have happened, and end."""
    if debug:
        traceback.print_exception(error)
    what = one_line(f"{type(error).__name__}: {error}")
    click.echo(
        f"kvsearch: this should not have happened ({what}); run again with --debug and report it",
        err=True,
    )
    sys.exit(1)


def _interrupt(*_: Any) -> None:
    """Ctrl-C or SIGTERM: stop in order; Ctrl-C after that stops at once."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # GNU's `timeout` sends two
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    raise KeyboardInterrupt
