"""Runs the subcommands, and turns errors into one line."""

import os
import sys
import warnings
from collections.abc import Sequence

import jax
import tyro

import ddnf
from ddnf.cli.bench import bench
from ddnf.cli.compare import compare
from ddnf.cli.fit import fit
from ddnf.cli.report import report
from ddnf.cli.reproduce import reproduce
from ddnf.cli.sample import sample
from ddnf.cli.score import score
from ddnf.cli.show import show
from ddnf.cli.view import view
from ddnf.training.processes import fail

COMMANDS = (fit, sample, score, show, view, compare, reproduce, report, bench)
_DESCRIPTION = (
    "Deep diffeomorphic normalizing flows: fit densities to tables, draw from them and score rows. "
    "`ddnf --version` prints the version."
)


def main(args: Sequence[str] | None = None) -> None:
    """Runs the `ddnf` command. Invalid input prints one line to standard error and exits with code 2.

    Args:
        args: the arguments after `ddnf`; None for `sys.argv`.

    Example:
        >>> main(["--version"])  # doctest: +ELLIPSIS
        ddnf ...
    """
    args = sys.argv[1:] if args is None else args
    if list(args) == ["--version"]:
        print(f"ddnf {ddnf.__version__}")
        return
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: _print_error(f"warning: {message}")
        try:
            ddnf.cache_compilation()
            _app().cli(prog="ddnf", description=_DESCRIPTION, args=args, config=(tyro.conf.DisallowNone,))
        except BrokenPipeError:
            # The reader of standard output has closed it. Without this, Python would print an error on exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except OSError as error:
            _exit(2, f"{error.strerror}: {error.filename}" if error.strerror and error.filename else str(error))
        except (ValueError, ImportError) as error:
            _exit(2, str(error))
        except (MemoryError, OverflowError, jax.errors.JaxRuntimeError) as error:
            _exit(2, f"Expected work that fits in memory; got {str(error) or type(error).__name__:.200}")
        except KeyboardInterrupt:
            _exit(130, "interrupted")


def _app() -> tyro.extras.SubcommandApp:
    app = tyro.extras.SubcommandApp()
    for command in COMMANDS:
        app.command(command)
    return app


def _exit(code: int, text: str) -> None:
    fail()
    _print_error(text)
    sys.exit(code)


def _print_error(text: str) -> None:
    print(f"ddnf: {' '.join(text.split())}", file=sys.stderr)
