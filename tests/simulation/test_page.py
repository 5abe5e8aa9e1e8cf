"""docs/simulate.md: what it shows is what the command prints, and its tables name what there is."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import fields

import click
import pytest
from click.testing import Result

from celery_strategies import cli
from celery_strategies.simulation.trace import Entry, parse
from tests.docs import pages

NAME = "docs/simulate.md"
TEXT = pages.read(NAME)


#: Other pages show commands that need a broker, and what they print depends on it.
BLOCKS = [block for block in pages.blocks("console") if str(block).startswith(f"{NAME}:")]


def test_the_page_shows_commands() -> None:
    assert len(BLOCKS) > 2


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_command_prints_what_the_page_shows(
    block: pages.Block, run: Callable[..., Result]
) -> None:
    command, _, shown = block.code.partition("\n")
    program, *words = shlex.split(command.removeprefix("$ "))
    assert program == "celery"
    printed = [line.rstrip() for line in run(*words).stdout.splitlines()]
    assert printed == shown.splitlines()


def test_every_option_is_in_the_table_and_no_other() -> None:
    params = [p for name in ("simulate", "record") for p in cli.strategies.commands[name].params]
    options = [param for param in params if isinstance(param, click.Option)]
    known = {opt for param in options for opt in (*param.opts, *param.secondary_opts)}
    named = set(re.findall(r"`(--?[\w-]+)", TEXT)) - {"-A", "-E"}
    assert named <= known
    assert known - named <= {"--queues", "--queue", "--output", "--seconds", "-o", "--help"}


def test_the_trace_shown_is_one() -> None:
    (block,) = pages.blocks("json")
    trace = parse(block.code)
    assert trace.queues == ["alerts", "emails"]
    assert len(trace.jobs(1.0, lambda _: 0)) == 241
    assert json.loads(block.code).keys() == {"queues", "tenants", "settings", "slots", "jobs"}


def test_every_field_of_a_job_is_in_the_table() -> None:
    named = set(re.findall(r"`(?:jobs\[\]\.)?(\w+)`", pages.section(TEXT, "A trace")))
    assert {field.name for field in fields(Entry)} <= named
