"""The `ddnf` command."""

from ddnf.cli.commands import app, main

__all__ = ["app", "main"]
