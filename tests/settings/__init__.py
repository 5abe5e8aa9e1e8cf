"""Tests of the settings, with real Celery apps and without a broker."""
