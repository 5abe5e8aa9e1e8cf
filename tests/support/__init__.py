"""What the tests stand on: private Redis servers, worker processes, a proxy that breaks things.

Nothing in here imports `celery_strategies`, except the test project when it is told to.
"""
