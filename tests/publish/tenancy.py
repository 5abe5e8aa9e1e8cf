"""The callables that apps of the survival tests name by their path."""

from __future__ import annotations

from typing import Any

from celery_strategies import UNKEYED, Publication


def fair_share(publication: Publication) -> Any:
    """Tag what names its tenant, as a web process would; have no opinion of the rest."""
    tenant = publication.kwargs.get("tenant")
    if tenant == "nobody":
        return UNKEYED
    return (tenant, 2) if tenant else None
