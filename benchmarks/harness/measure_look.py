"""What it costs to look: each command of ``celery strategies`` on a million waiting jobs of 10,000 keys.

No worker runs. Half of the jobs are sorted, and half wait in a queue without a policy; both are written as the scripts
leave them, since to sort them takes a minute. A command is timed from its start to its end, interpreter included; its
slowest call comes from the slow log.
"""

import json
import os
import pathlib
import subprocess
import sys
import time
import uuid

from . import backlog
from .server import RedisServer
from .tables import Bar, Table

KEYS, JOBS, QUICK = 10_000, 1_000_000, 100_000
BASE = "strategies:{sorted}:"
ONE_SECOND = Bar(1.0, at_least=False, ratio=False)
LONGEST_CALL = Bar(10.0, at_least=False, ratio=False)


def run(plan):
    jobs = QUICK if plan.quick else JOBS
    table = Table(
        f"Looking at {jobs:,} jobs, {KEYS:,} keys",
        "One queue sorted, one not, half each. Whole commands, and the slowest Redis call of each.",
        labels=["ours"],
    )
    with RedisServer(plan.redis_server) as server:
        tasks = build(server.client, jobs)
        for name, words in commands(tasks).items():
            bar = None if "--deep" in words else ONE_SECOND
            for _ in range(plan.rounds):
                seconds, slowest = timed(server, words)
                table.row(name, "s", bar).add("ours", seconds)
                table.row(f"{name}: slowest call", "ms", LONGEST_CALL).add("ours", slowest)
    return [table]


def commands(tasks):
    """Return the words of each command by what the table calls it."""
    return {
        "status": ["status"],
        "top, one picture": ["top", "-n", "1"],
        "tenants": ["tenants", "sorted"],
        "explain, next of its key": ["explain", tasks["next"]],
        "explain, newest of its key": ["explain", tasks["newest"]],
        "explain, middle, named key": [
            "explain",
            tasks["middle"],
            "-q",
            "sorted",
            "-k",
            "tenant-7",
        ],
        "explain, middle": ["explain", tasks["middle"]],
        "explain, next of the plain queue": ["explain", tasks["plain"]],
        "explain, unknown": ["explain", "no-such-task"],
        "explain, unknown, --deep": ["explain", "no-such-task", "--deep"],
    }


def timed(server, words):
    """Return the seconds that a command took, and the ms of its slowest call."""
    client = server.client
    client.config_set("slowlog-max-len", 100_000)
    client.config_set("slowlog-log-slower-than", 100)
    client.slowlog_reset()
    command = [str(pathlib.Path(sys.executable).with_name("celery")), "strategies", *words]
    begun = time.monotonic()
    done = subprocess.run(
        command,
        env={**os.environ, "CELERY_BROKER_URL": server.url},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - begun
    calls = [entry["duration"] / 1000 for entry in client.slowlog_get(100_000)]
    if done.returncode not in (0, 1) or "Traceback" in done.stderr:
        raise RuntimeError(f"{words}: {done.stdout}{done.stderr}")
    return seconds, max(calls, default=0.0)


def build(client, jobs):
    """Fill two queues; returns the ids of some of their jobs."""
    each = jobs // 2 // KEYS
    made = backlog.Template("bench.noop", queue="sorted", keyed=True)
    watched, number = {}, 0
    pipe = client.pipeline(transaction=False)
    for key in range(KEYS):
        name, ids = backlog.tenant(key), [str(uuid.uuid4()) for _ in range(each)]
        elements = []
        for task in ids:
            number += 1
            elements.append(b"%d:0::%b" % (number, copied(made, task, name)))
        pipe.lpush(f"{BASE}jobs:0:{name}", *elements)
        pipe.zadd(f"{BASE}index:0", {f"0{number - each + 1:016d}{name}": 1.0})
        if key == 7:
            watched = {"next": ids[0], "newest": ids[-1], "middle": ids[each // 2]}
        if key % 100 == 99:
            pipe.execute()
    policy = {"order": "fair", "single": 0, "key": "fair_key", "weight": "fair_weight"}
    pipe.hset(f"{BASE}policy", mapping={**policy, "caps": 0, "weights": 0})
    pipe.hset(f"{BASE}state", mapping={"r0": number, "t": number})
    pipe.set(f"{BASE}ready", 1)
    plain = backlog.Template("bench.noop", queue="plain", keyed=True)
    watched["plain"] = str(uuid.uuid4())
    pipe.lpush("plain", copied(plain, watched["plain"], "x"))
    for start in range(1, jobs - number, 1000):
        copies = range(start, min(start + 1000, jobs - number))
        pipe.lpush("plain", *(copied(plain, str(uuid.uuid4()), "x") for _ in copies))
        pipe.execute()
    pipe.set("strategies:sequence", number)
    pipe.sadd("_kombu.binding.plain", "plain\x06\x16\x06\x16plain")
    pipe.execute()
    if json.loads(client.lindex("plain", -1))["headers"]["id"] != watched["plain"]:
        raise AssertionError("not the message that was made")
    return watched


def copied(made, task, key):
    """Return a copy of a message with this id and key."""
    data = made.bytes.replace(made.task_id, task.encode())
    return data.replace(backlog.KEY.encode(), key.encode(), 1)
