"""Prints the lower bounds of pyproject.toml as constraints of pip: `python tests/lowest.py > lowest.txt`."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
extras = project["optional-dependencies"]
wanted = [*project["dependencies"], *(line for name in extras if name not in ("docs", "dev") for line in extras[name])]
for name, version in sorted({match.groups() for line in wanted if (match := re.match(r"([\w-]+)>=([\d.]+)", line))}):
    print(f"{name}=={version}")
