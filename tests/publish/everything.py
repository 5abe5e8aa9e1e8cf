"""Publish every kind of thing that Celery can: `python -m tests.publish.everything`.

The app is that of `tests.support.project`, from the environment; with `--no-kill`, nothing ends a
process. A JSON object goes out: for the label of each task that will run, the key and the weight
that it must see.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from celery import Celery, Signature, chain, chord, group

from tests.support.apps import PREFIX
from tests.support.project import app as project

Tag = tuple[Any, Any]

ACME = ("acme", 2)


def sig(app: Celery, task: str, *args: Any, **kwargs: Any) -> Signature:
    return app.signature(PREFIX + task, args, kwargs)


def publish(app: Celery, kill: bool) -> dict[str, Tag]:  # noqa: PLR0915  # a list
    """Publish, mostly for the tenant acme; return which tag each task must see."""

    def see(label: str, **kwargs: Any) -> Signature:
        return sig(app, "see", label=label, **kwargs)

    acme = {"tenant": "acme"}
    expected: dict[str, Tag] = {}

    def expect(*labels: str, tag: Tag = ACME) -> None:
        expected.update(dict.fromkeys(labels, tag))

    see("plain", **acme).delay()
    expect("plain")
    see("untagged").delay()
    expect("untagged", tag=(None, None))
    see("explicit").apply_async(headers={"fair_key": "other", "fair_weight": 0.5})
    expect("explicit", tag=("other", 0.5))

    sig(app, "retry", "retry", **acme).delay()
    sig(app, "retry", "retry with headers", headers={"x": 1}, **acme).delay()
    sig(app, "autoretry", "autoretry", **acme).delay()
    for label in ("retry", "retry with headers", "autoretry"):
        expect(f"{label} 0", f"{label} 1")
    sig(app, "retry", "untagged retry").delay()
    expect("untagged retry 0", "untagged retry 1", tag=(None, None))

    sig(app, "nest", "nest", **acme).delay()
    ways = ("delay", "signature", "send_task", "function")
    expect("nest", *(f"nest > {way}" for way in ways))
    expect("nest > explicit", tag=("other", None))
    expect("nest > callable", tag=("third", 2))
    expect("nest > none", "nest > unkeyed", tag=(None, None))

    sig(app, "substitute", "substitute", **acme).delay()
    expect("substitute", "substitute > replaced", "substitute > next")

    group(see("group a", **acme), see("group b", tenant="b")).delay()
    expect("group a")
    expect("group b", tag=("b", 2))
    chain(see("chain 1", **acme), see("chain 2"), see("chain 3")).delay()
    expect("chain 1", "chain 2", "chain 3")
    chain(see("then 1", **acme), group(see("then a"), see("then b"))).delay()
    expect("then 1", "then a", "then b")
    chord([see("header a", **acme), see("header b", **acme)], see("body")).delay()
    expect("header a", "header b", "body")
    chord([see("headers a"), see("headers b")], see("headers body")).apply_async(
        headers={"fair_key": "chord", "fair_weight": 2}
    )
    expect("headers a", "headers b", "headers body", tag=("chord", 2))
    chain(see("long 1", **acme), group(see("long a"), see("long b")), see("long end")).delay()
    expect("long 1", "long a", "long b", "long end")

    see("linked", **acme).apply_async(link=see("link"))
    expect("linked", "link")
    sig(app, "break_down", label="fails", **acme).apply_async(link_error=see("link_error"))
    expect("fails", "link_error")
    chord(
        [sig(app, "break_down", label="bad part", **acme), see("good part", **acme)],
        see("never").on_error(see("chord error")),
    ).delay()
    expect("bad part", "good part", "chord error")

    if not kill:
        return expected
    sig(app, "killed_once", "killed", **acme).delay()
    expect("killed 1", "killed 2")
    # From here on it is the parent process that reports the failure, where no task runs.
    for how, limits in (("lost", {}), ("hard", {"time_limit": 1})):
        part = sig(app, "fail_part", how, how, **acme).set(**limits)
        part.apply_async(link_error=see(f"{how} > link_error"))
        expect(how, f"{how} > link_error")
    part = sig(app, "fail_part", "hard part", "hard", **acme).set(time_limit=1)
    chord([part], see("never").on_error(see("hard chord error"))).delay()
    expect("hard part", "hard chord error")
    return expected


if __name__ == "__main__":
    json.dump(publish(project, kill="--no-kill" not in sys.argv), sys.stdout)
