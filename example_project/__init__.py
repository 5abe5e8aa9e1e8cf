"""An example: three queues, one worker, four strategies. `python3 example_project/run.py` runs it.

`celery.py` makes the app, `celeryconfig.py` configures it, `tasks.py` has the one task, and
`producer.py` fills the queues from a stock Celery client. `run.py` and `environment.py` are the
command around them.
"""
