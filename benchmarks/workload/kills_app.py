"""The app of kills.py: numbered jobs that say when they start and end."""

import json
import os
import time

import redis
from celery import Celery

import celery_strategies  # noqa: F401

app = Celery("kills", broker=os.environ["BENCH_BROKER"])
app.conf.update(
    task_ignore_result=True,
    task_acks_late=True,
    broker_connection_retry_on_startup=True,
    imports=("celery_strategies",),
    **json.loads(os.environ["BENCH_SETTINGS"]),
)
_clients = {}


def say(self, number, event):
    """Write down what happened, by the machine's monotonic clock."""
    client = _clients.get(os.getpid())
    if client is None:
        client = _clients[os.getpid()] = redis.Redis.from_url(os.environ["BENCH_RECORDS"])
    name = self.request.hostname.partition("@")[0]
    client.rpush("ran", f"{name} {number} {event} {time.monotonic():.6f}")


@app.task(bind=True, name="kills.work")
def work(self, number, seconds):
    """Take a while."""
    say(self, number, "start")
    time.sleep(seconds)
    say(self, number, "end")
