"""Own the answer to "whose job is this?": what `strategies_fair_share` is set to."""

from __future__ import annotations

from celery_strategies import Publication


def fair_share(publication: Publication) -> str | None:
    """Return the tenant of a job, or None for a job that is nobody's."""
    tenant: str | None = publication.kwargs.get("tenant")
    return tenant
