"""Broken links of a built site: files and anchors that its pages refer to and that are not there."""

from functools import lru_cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """The links of a page, and the names that links can point to."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


@lru_cache
def _page(path: Path) -> _Page:
    return _Page(path.read_text("utf-8"))


def broken(site: Path) -> list[str]:
    """Links of all pages below a folder that lead nowhere; those to other hosts are not followed."""
    _page.cache_clear()
    pages = sorted(path for path in site.rglob("*.html") if path.name != "404.html")
    return [f"{path.relative_to(site)}: {link}" for path in pages for link in _page(path).links if _fails(path, link)]


def _fails(path: Path, link: str) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return False
    target = path if not parts.path else path.parent / unquote(parts.path)
    target = target / "index.html" if target.is_dir() else target
    if not target.exists():
        return True
    # Material's own links to the top of a page are made by its scripts.
    is_anchor = bool(parts.fragment) and parts.fragment != "__top" and target.suffix == ".html"
    return is_anchor and unquote(parts.fragment) not in _page(target).anchors
