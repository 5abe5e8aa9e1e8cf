"""Put real Celery messages into a queue, fast.

One message is made by stock Celery; the rest are copies of its bytes with ids of their
own, pushed in one LPUSH. Must not import celery_strategies: the producer is a stock one.
"""

import base64
import json
import uuid

import celery


def make(name, args=(), queue="celery"):
    """Return the bytes that a stock producer pushes for one job."""
    app = celery.Celery("producer", broker="memory://", set_as_current=False)
    sent = {}
    with app.connection_for_write() as connection:
        channel = connection.default_channel
        channel._put = lambda _, message, **__: sent.update(message)  # noqa: SLF001 (the bytes)
        with app.amqp.Producer(channel) as producer:
            app.send_task(name, args=args, queue=queue, producer=producer, ignore_result=True)
    return json.dumps(sent).encode()


class Template:
    """A message to copy; *queue* is both its routing key and the list it goes to."""

    def __init__(self, name, args=(), queue="celery"):
        self.queue = queue
        self.bytes = make(name, args, queue)
        message = json.loads(self.bytes)
        self.task_id = message["headers"]["id"].encode()
        self.tag = message["properties"]["delivery_tag"].encode()
        self.body = message["body"].encode()
        if b'"lang": "py"' not in self.bytes or self.body not in self.bytes:
            raise AssertionError("not a Celery message")

    def copy(self, args=None):
        """Return a copy with a new task id and delivery tag, and *args* if given."""
        data = self.bytes.replace(self.task_id, str(uuid.uuid4()).encode())
        data = data.replace(self.tag, str(uuid.uuid4()).encode())
        if args is not None:
            embed = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
            body = base64.b64encode(json.dumps([args, {}, embed]).encode())
            data = data.replace(self.body, body)
        return data

    def push(self, client, count, key=None):
        """Push *count* copies to the queue (or to the list *key*), at once."""
        client.lpush(key or self.queue, *(self.copy() for _ in range(count)))


def left_over(client, queue="celery"):
    """Return how many messages Redis still holds: waiting in *queue*, and unacked."""
    pipe = client.pipeline(transaction=False)
    pipe.llen(queue)
    for step in range(1, 10):
        pipe.llen(f"{queue}\x06\x16{step}")
    pipe.hlen("unacked")
    return sum(pipe.execute())
