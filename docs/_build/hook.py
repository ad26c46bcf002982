"""MkDocs hook: adds the generated pages (reference, results, tutorials) and their pictures; turns formulas into MathML."""

import html
import re
import sys
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from docs._build import reference, results, tutorials

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.S)


def on_files(files, config):
    """Adds the pages that are made from the code, the result files and the tutorials."""
    pages = reference.pages() | results.pages() | {"changelog.md": _changelog()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    cache = ROOT / ".docs_cache"
    for page, folder in tutorials.render_all(ROOT / "docs", cache):
        for path in (page, *page.parent.glob(f"{page.stem}-*.svg")):
            files.append(File.generated(config, f"{folder}/{path.name}", abs_src_path=str(path)))
    for path, source in results.assets(cache).items():
        files.append(File.generated(config, path, abs_src_path=str(source)))
    return files


def on_page_content(content, page, config, files):
    """Formulas as MathML, which browsers render without scripts."""

    def mathml(match):
        display = "block" if match[2] == "[" else "inline"
        return convert(html.unescape(match[3]).strip(), display=display)

    return _FORMULA.sub(mathml, content)


def _changelog() -> str:
    return (ROOT / "CHANGELOG.md").read_text("utf-8")
