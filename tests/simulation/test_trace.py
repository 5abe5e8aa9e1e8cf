"""Traces and backlogs: what may stand in them, and what is said of the rest."""

from __future__ import annotations

import json

import pytest

from celery_strategies.simulation.errors import SimulationError
from celery_strategies.simulation.trace import Entry, Trace, dump, parse, parse_backlog


def test_a_backlog_in_words() -> None:
    trace = parse_backlog(["alerts=2", "emails=acme:30,minnow:2@1,4", "alerts=1@2"])
    assert trace.queues == ["alerts", "emails"]
    assert [(e.queue, e.key, e.count, e.level) for e in trace.entries] == [
        ("alerts", "", 2, None),
        ("emails", "acme", 30, None),
        ("emails", "minnow", 2, 1),
        ("emails", "", 4, None),
        ("alerts", "", 1, 2),
    ]
    assert trace.keys == ["acme", "minnow"]


def test_names_may_be_odd() -> None:
    trace = parse_backlog(["a=b=a:b:3", "q=*:1"])
    assert trace.queues == ["a=b", "q"]
    assert [entry.key for entry in trace.entries] == ["a:b", "*"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("alerts", "'alerts': a backlog is QUEUE=NUMBER"),
        ("=3", "'=3': a backlog is QUEUE=NUMBER"),
        ("alerts=x", "'alerts=x': 'x' must be NUMBER or KEY:NUMBER"),
        ("alerts=", "'alerts=': '' must be NUMBER or KEY:NUMBER"),
        ("alerts=-1", "'-1' must be NUMBER"),
        ("alerts=a:1,,b:2", "'' must be NUMBER"),
        ("alerts=1@10", "'1@10' must be NUMBER"),
        ("alerts=9999999", "these are 9999999 jobs; a simulation has at most 1000000"),
        ("alerts=" + "k" * 600 + ":1", "a key must be at most 512 bytes"),
    ],
)
def test_what_is_wrong_with_a_backlog_is_said(word: str, said: str) -> None:
    with pytest.raises(SimulationError) as error:
        parse_backlog([word])
    assert said in str(error.value)
    assert "\n" not in str(error.value)


TRACE = {
    "queues": [{"name": "alerts", "rank": 1, "levels": 3}, "emails"],
    "tenants": {"acme": {"weight": 3, "cap": 2}, "*": {"cap": 5}},
    "settings": {"strategies_strategy": "max_len"},
    "slots": 4,
    "jobs": [
        {"queue": "alerts", "at": 0.5, "run": 2, "level": 2, "name": "first"},
        {"queue": "emails", "key": "acme", "count": 3, "every": 0.25},
        {"queue": "emails", "key": 42, "weight": 2, "count": 0},
    ],
}


def test_a_trace() -> None:
    trace = parse(json.dumps(TRACE))
    assert (trace.queues, trace.ranks, trace.levels) == (
        ["alerts", "emails"],
        {"alerts": 1},
        {"alerts": 3},
    )
    assert (trace.weights, trace.caps, trace.slots) == ({"acme": 3.0}, {"acme": 2, "*": 5}, 4)
    assert trace.settings == TRACE["settings"]
    first, *rest = trace.jobs(1.0, lambda _: 7)
    assert (first.at, first.run, first.list, first.name) == (0.5, 2.0, 2, "first")
    # What a job does not say, its tenant, its queue or the command line does.
    assert [(job.at, job.run, job.list, job.key, job.weight) for job in rest] == [
        (0.0, 1.0, 7, "acme", 3.0),
        (0.25, 1.0, 7, "acme", 3.0),
        (0.5, 1.0, 7, "acme", 3.0),
    ]
    assert trace.entries[2].key == "42"


def test_a_trace_survives_being_written() -> None:
    trace = parse(json.dumps(TRACE))
    assert parse(dump(trace, {"seconds": 3})) == trace
    assert parse(dump(Trace())) == Trace()
    assert dump(trace).count("\n") > 6


def test_queues_come_up_in_the_order_of_the_jobs() -> None:
    assert parse('{"jobs": [{"queue": "b"}, {"queue": "a"}]}').queues == ["b", "a"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nope", "t.json is not JSON: Expecting value"),
        ("[]", "t.json: the whole = []: must be an object with queues, tenants"),
        ("[" * 100_000, "t.json is nested too deeply"),
        ("{}", "t.json: there is no 'jobs'"),
        ('{"jbos": []}', "t.json: 'jbos' is not a field; did you mean 'jobs'?"),
        ('{"jobs": {}}', "jobs = {}: must be a list"),
        ('{"jobs": [1]}', "jobs[0] = 1: must be an object with queue"),
        ('{"jobs": [{}]}', "jobs[0].queue = None: must be the name of a queue"),
        ('{"jobs": [{"queue": "q"}, {"queu": "q"}]}', "jobs[1]: 'queu' is not a field; did you mean 'queue'?"),
        ('{"jobs": [{"queue": "q", "at": -1}]}', "jobs[0].at = -1: must be a number of seconds"),
        ('{"jobs": [{"queue": "q", "at": NaN}]}', "jobs[0].at = nan: must be"),
        ('{"jobs": [{"queue": "q", "run": "1"}]}', "jobs[0].run = '1': must be a number"),
        ('{"jobs": [{"queue": "q", "run": true}]}', "jobs[0].run = True: must be a number"),
        ('{"jobs": [{"queue": "q", "level": 10}]}', "jobs[0].level = 10: must be an integer from 0 to 9"),
        ('{"jobs": [{"queue": "q", "key": ""}]}', "jobs[0].key = '': a key must not be empty"),
        ('{"jobs": [{"queue": "q", "weight": 0}]}', "jobs[0].weight = 0: a weight must be a number from"),
        ('{"jobs": [{"queue": "q", "count": 1.5}]}', "jobs[0].count = 1.5: must be an integer, 0 or more"),
        ('{"jobs": [{"queue": "q", "count": 2000000}]}', "these are 2000000 jobs"),
        ('{"jobs": [{"queue": "q", "count": 999, "every": 1e9}]}', "the last arrival ="),
        ('{"queues": ["alerts"], "jobs": [{"queue": "alert"}]}', "did you mean 'alerts'?"),
        ('{"queues": ["a", "a"], "jobs": []}', "queues[1]: queue 'a' is there twice"),
        ('{"queues": [{"name": "a", "levels": 11}], "jobs": []}', "queues[0].levels = 11: must be an integer from"),
        ('{"queues": [{"name": "a", "rank": "1"}], "jobs": []}', "queues[0].rank = '1': must be an integer"),
        ('{"tenants": [], "jobs": []}', "tenants must be an object"),
        ('{"tenants": {"a": {"wieght": 1}}, "jobs": []}', "did you mean 'weight'?"),
        ('{"tenants": {"a": {"cap": 0}}, "jobs": []}', "tenants['a'].cap = 0: must be an integer, 1 or more"),
        ('{"settings": 1, "jobs": []}', "settings must be an object"),
        ('{"slots": 0, "jobs": []}', "slots = 0: must be an integer, 1 or more"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_trace_is_said(text: str, said: str) -> None:
    with pytest.raises(SimulationError) as error:
        parse(text, "t.json")
    assert said in str(error.value)
    assert str(error.value).startswith("t.json")
    assert "\n" not in str(error.value)


def test_entries_say_as_little_as_they_can() -> None:
    text = dump(Trace(entries=[Entry("q"), Entry("q", at=1.5, key="a")], queues=["q"]))
    assert '{"queue": "q"},' in text
    assert '{"queue": "q", "at": 1.5, "key": "a"}' in text
