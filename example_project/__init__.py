"""An example: queues, tenants and a worker. `run.py` and `fair.py` are its two commands.

`celery.py` makes the app, `celeryconfig.py` configures it, `tasks.py` has the tasks, `tenancy.py`
says whose a job is.

`python3 example_project/run.py`: three queues, four strategies; `producer.py` fills the queues from
a stock Celery client. `python3 example_project/fair.py`: a whale and ten minnows on one queue,
published by `tenants.py`, with `stock.py`, the same app without celery-strategies, and with ours.
`environment.py` makes the environment of both.
"""
