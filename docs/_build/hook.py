"""MkDocs hook: generated pages with their pictures, formulas as MathML, and a check of the links."""

import html
import re
import sys
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from docs._build import links, reference, results, tutorials

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.S)


def on_files(files, config):
    """Adds the pages that are made from the code, the result files and the tutorials."""
    pages = reference.pages() | results.pages() | {"changelog.md": _changelog()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    cache = ROOT / ".docs_cache"
    for page, folder in tutorials.render_all(ROOT / "docs", cache):
        pictures = (path for path in page.parent.glob(f"{page.stem}-*") if path.suffix in (".svg", ".png"))
        for path in (page, *pictures):
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


def on_post_build(config):
    """MkDocs checks the links of Markdown; these are those of the finished pages, the report among them."""
    if found := links.broken(Path(config.site_dir)):
        raise PluginError("Broken links:\n" + "\n".join(found))


def _changelog() -> str:
    return (ROOT / "CHANGELOG.md").read_text("utf-8")
