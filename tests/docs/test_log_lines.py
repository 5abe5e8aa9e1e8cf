"""Every line that the package can log is explained in docs/operating.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import pages

PACKAGE = pages.ROOT / "celery_strategies"
METHODS = ("info", "warning", "error", "critical", "exception", "complain")


def templates(path: Path) -> Iterator[str]:
    """Yield the first text of each call of a logger, or of what complains once, in a module."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr not in METHODS:
            continue
        # complain(key, text, ...) names the complaint first.
        texts = node.args[1:] if node.func.attr == "complain" else node.args
        if texts and isinstance(texts[0], ast.Constant) and isinstance(texts[0].value, str):
            yield texts[0].value


LINES = sorted({line for path in PACKAGE.rglob("*.py") for line in templates(path)} - {"%s"})


def test_there_are_lines() -> None:
    assert len(LINES) > 10


@pytest.mark.parametrize("line", LINES)
def test_a_log_line_is_explained(line: str) -> None:
    section = pages.section(pages.read("docs/operating.md"), "Log lines")
    section = re.sub(r"\s+", " ", section)
    literal = [part.strip(" ():,'") for part in re.split(r"%[srdg.\d]*[a-z]", line)]
    for part in literal:
        assert part in section, f"{part!r} of {line!r}"
