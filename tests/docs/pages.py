"""Own the reading of the documentation: pages, their blocks of code, tables and links."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = tuple(sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]))

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
_LINK = re.compile(r"(?<!!)\[[^\]\n]+\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
_CELL = re.compile(r"(?<!\\)\|")


class Block(NamedTuple):
    """A fenced block of code."""

    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read(name: str) -> str:
    """Return the text of a page, named from the root of the repository."""
    return (ROOT / name).read_text("utf-8")


def names() -> list[str]:
    """Return all pages, named from the root."""
    return [str(page.relative_to(ROOT)) for page in PAGES]


def for_users() -> list[str]:
    """Return the pages that speak of settings to users, not of names inside the package."""
    return [name for name in names() if name not in ("docs/decisions.md", "docs/results.md")]


def prose(text: str) -> str:
    """Return *text* without its blocks of code, with as many lines."""
    return _FENCE.sub(lambda match: "\n" * match.group().count("\n"), text)


def blocks(language: str) -> list[Block]:
    """Return every block of *language* in all pages."""
    found = []
    for name in names():
        text = read(name)
        for match in _FENCE.finditer(text):
            if match["language"] == language:
                line = text.count("\n", 0, match.start()) + 1
                found.append(Block(name, line, language, match["code"]))
    return found


def links(name: str) -> list[str]:
    """Return the targets of the links of a page."""
    return [match[1] for match in _LINK.finditer(prose(read(name)))]


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found = set()
    for match in _HEADING.finditer(prose(text)):
        plain = re.sub(r"[`*]", "", match[1]).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def rows(text: str) -> Iterator[list[str]]:
    """Yield the cells of every table row in *text*, headings too, rulers not."""
    for line in prose(text).splitlines():
        if line.startswith("|") and not re.fullmatch(r"[|\-: ]+", line):
            yield [cell.strip() for cell in _CELL.split(line)[1:-1]]


def section(text: str, title: str) -> str:
    """Return what stands under a heading, up to the next one of its rank or a higher one."""
    heading = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert heading is not None, f"no heading {title!r}"
    rest = text[heading.end() :]
    following = re.search(rf"^#{{1,{len(heading[1])}}} ", rest, re.MULTILINE)
    return rest[: following.start()] if following else rest


def ours(code: str) -> dict[str, Any]:
    """Return the literal assignments to settings of ours in a block of Python."""
    found = {}
    for node in ast.parse(code).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if "strategies_" in name.lower():
                found[name] = ast.literal_eval(node.value)
    return found
