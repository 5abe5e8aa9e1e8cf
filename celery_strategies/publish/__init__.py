"""See the package docstring of celery_strategies."""
