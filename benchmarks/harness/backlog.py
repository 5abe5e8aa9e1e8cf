"""Put real Celery messages into a queue, fast.

One message is made by stock Celery; the rest are copies of its bytes with ids of their
own, pushed in one LPUSH. Must not import celery_strategies: the producer is a stock one.
"""

import base64
import json
import uuid

import celery

#: Stands in a keyed template for the key.
KEY = "the-key-of-this-message"


def make(name, args=(), queue="celery", headers=None):
    """Return the bytes that a stock producer pushes for one job."""
    app = celery.Celery("producer", broker="memory://", set_as_current=False)
    sent = {}
    with app.connection_for_write() as connection:
        channel = connection.default_channel
        channel._put = lambda _, message, **__: sent.update(message)  # noqa: SLF001 (the bytes)
        with app.amqp.Producer(channel) as producer:
            app.send_task(
                name, args, queue=queue, producer=producer, ignore_result=True, headers=headers
            )
    return json.dumps(sent).encode()


class Template:
    """A message to copy; *queue* is both its routing key and the list it goes to.

    With *keyed*, copies carry a ``fair_key`` header.
    """

    def __init__(self, name, args=(), queue="celery", *, keyed=False):
        self.queue = queue
        self.bytes = make(name, args, queue, {"fair_key": KEY} if keyed else None)
        message = json.loads(self.bytes)
        self.task_id = message["headers"]["id"].encode()
        self.tag = message["properties"]["delivery_tag"].encode()
        self.body = message["body"].encode()
        if b'"lang": "py"' not in self.bytes or self.body not in self.bytes:
            raise AssertionError("not a Celery message")

    def copy(self, args=None, key=None):
        """Return a copy with a new task id and delivery tag, and *args* and *key* if given."""
        data = self.bytes.replace(self.task_id, str(uuid.uuid4()).encode())
        data = data.replace(self.tag, str(uuid.uuid4()).encode())
        if key is not None:
            data = data.replace(KEY.encode(), key.encode(), 1)
        if args is not None:
            embed = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
            body = base64.b64encode(json.dumps([args, {}, embed]).encode())
            data = data.replace(self.body, body)
        return data

    def push(self, client, count, key=None):
        """Push *count* copies to the queue (or to the list *key*), at once."""
        client.lpush(key or self.queue, *(self.copy() for _ in range(count)))

    def push_keyed(self, client, count, keys, to=None, chunk=1000):
        """Push *count* copies whose keys take turns over *keys* tenants, in several calls."""
        chunk = max(1, min(chunk, (8 << 20) // len(self.bytes)))
        for start in range(0, count, chunk):
            numbers = range(start, min(count, start + chunk))
            copies = [self.copy(key=tenant(number % keys)) for number in numbers]
            client.lpush(to or self.queue, *copies)


def tenant(number):
    """Return the key of one tenant."""
    return f"tenant-{number}"


def left_over(client, queue="celery"):
    """Return how many messages Redis still holds: waiting in *queue*, and unacked."""
    pipe = client.pipeline(transaction=False)
    pipe.llen(queue)
    for step in range(1, 10):
        pipe.llen(f"{queue}\x06\x16{step}")
    pipe.hlen("unacked")
    return sum(pipe.execute())
