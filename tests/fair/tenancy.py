"""The callables that apps of these tests name by their path: the key is what stands before the dash of a label."""

from __future__ import annotations

from celery_strategies import Publication


def fair_share(publication: Publication) -> str | None:
    return group_key(publication)


def group_key(publication: Publication) -> str | None:
    label = str(publication.args[0]) if publication.args else ""
    return label.partition("-")[0] if "-" in label else None
