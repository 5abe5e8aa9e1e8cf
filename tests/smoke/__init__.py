"""A worker, a broker and a result backend as pytest-celery sets them up, used as a user would."""
