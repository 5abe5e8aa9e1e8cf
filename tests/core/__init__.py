"""Tests of the pure core: no Redis, no Celery."""
