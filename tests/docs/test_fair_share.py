"""Every order that docs/fair-share.md shows is the order of core/interleave.py."""

from __future__ import annotations

import random
import re
from math import floor

import pytest

from celery_strategies.core.interleave import Interleave, Job

from . import pages

PAGE = "docs/fair-share.md"
TEXT = pages.read(PAGE)
BLOCKS = pages.blocks("timeline")

DECISIONS = (
    "pause → single-active lease → consumer priority (stand-by) → strategy picks the source → "
    "strict priority level → fair share or group picks the key → caps skip keys that are full → "
    "oldest visible message of that key."
)

#: Key ("-" for none), how many jobs, weight, level.
TENANT = re.compile(r"([a-z]+|-)\N{MULTIPLICATION SIGN}(\d+)(?: w([\d.]+))?(?: p(\d))?")

_MODES = {
    "shared": Interleave("fair"),
    "batch": Interleave("batch"),
    "fifo": Interleave("age", single=True),
    "round_robin": Interleave("turn", single=True),
}


class Played:
    """Plays the lines of a timeline, and asserts what each says."""

    def __init__(self) -> None:
        self.interleave = _MODES["shared"].copy()
        self.pushed = 0

    def play(self, line: str) -> None:
        words = line.partition("#")[0].split()
        getattr(self, words[0])(*words[1:])

    def mode(self, name: str) -> None:
        self.interleave = _MODES[name].copy()

    def levels(self, number: str) -> None:
        assert int(number) > 1

    def queue(self, *words: str) -> None:
        for tenant in " ".join(words).split(", "):
            found = TENANT.fullmatch(tenant)
            assert found, tenant
            key = found[1].replace("-", "")
            for _ in range(int(found[2])):
                self.pushed += 1
                name = f"{(key or 'u')[0]}{self.pushed}"
                self.interleave.push(name, key, float(found[3] or 1), int(found[4] or 0))

    def take(self, *names: str) -> None:
        if names == ("-",):
            assert self.interleave.take(2) == []
        else:
            assert [job.job for job in self.interleave.take(len(names))] == list(names)

    def back(self, *names: str) -> None:
        self.interleave.restore(*names)

    def end(self, *names: str) -> None:
        for name in names:
            self.interleave.end(name)

    def weight(self, key: str, weight: str) -> None:
        self.interleave.set_weight(key, None if weight == "none" else float(weight))

    def cap(self, key: str, cap: str) -> None:
        self.interleave.set_cap(key, int(cap))


def test_there_are_timelines_of_every_kind() -> None:
    assert {block.page for block in BLOCKS} == {PAGE}
    words = {line.split()[0] for block in BLOCKS for line in block.code.splitlines()}
    assert words == {"mode", "levels", "queue", "take", "back", "end", "weight", "cap"}
    assert all(re.search(rf"^mode +{mode}$", TEXT, re.MULTILINE) for mode in list(_MODES)[1:])


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_timeline_is_what_the_interleave_yields(block: pages.Block) -> None:
    played = Played()
    for line in block.code.splitlines():
        played.play(line)


def test_the_table_of_tags_is_what_the_interleave_counts() -> None:
    (_, *rows) = [row for row in pages.rows(pages.section(TEXT, "The rule")) if len(row) == 6]
    assert len(rows) == 8
    interleave = Interleave()
    for number in range(10):
        interleave.push(f"acme {number}", "acme", 3)
    for number in range(10):
        interleave.push(f"zed {number}", "zed")
    for number, (slot, acme, zed, takes, virtual, why) in enumerate(rows, 1):
        assert int(slot) == number
        index = interleave.index()
        assert (f"{index['acme'].finish:.2f}", f"{index['zed'].finish:.2f}") == (acme, zed)
        (job,) = interleave.take()
        assert job.key == takes
        assert f"{interleave.virtual_time():.2f}" == virtual
        equal = "equal, and its job is older"
        assert why == (equal if acme == zed else "lowest")


def newcomer(rng: random.Random) -> tuple[list[Job], dict[str, float], float]:
    """Return what is taken before a newcomer's first job, and all weights, the newcomer's last."""
    interleave = Interleave()
    weights = {f"k{n}": rng.choice([0.3, 0.5, 1, 1, 1, 2, 3, 7]) for n in range(rng.randint(1, 6))}
    for _ in range(200):
        key = rng.choice([*weights])
        interleave.push(rng.random(), key, weights[key])
    interleave.take(rng.randint(0, 60))
    own = rng.choice([0.3, 0.5, 1, 1, 2, 3, 7])
    interleave.push("first", "new", own)
    before: list[Job] = []
    while (job := interleave.take()[0]).key != "new":
        before.append(job)
    return before, weights, own


@pytest.mark.parametrize("seed", range(100))
def test_a_newcomer_waits_no_longer_than_the_page_says(seed: int) -> None:
    assert "at most w₂/w₁ + 1 jobs of each other key that has some, rounded down" in " ".join(
        TEXT.split()
    )
    before, weights, own = newcomer(random.Random(seed))
    for key, weight in weights.items():
        # A billionth, since a sum of weights is not exact.
        assert sum(job.key == key for job in before) <= floor(weight / own + 1e-9) + 1


def test_the_order_of_decisions_is_one_line_in_both_pages() -> None:
    assert f"\n{DECISIONS}\n" in TEXT
    assert f"\n{DECISIONS}\n" in pages.read("README.md")
