"""The `ddnf` command. Each subcommand is a function in a file of its own: its arguments are the options, its docstring
the help. `ddnf.cli.app` runs them."""

from ddnf.cli.app import main

__all__ = ["main"]
