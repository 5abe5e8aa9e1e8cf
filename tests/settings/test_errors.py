"""The errors are Celery's for programs and click's for the command line."""

from __future__ import annotations

import pickle

import celery.exceptions
import click
import pytest
from click.testing import CliRunner

from celery_strategies.errors import ImproperlyConfigured, NotOurTransport, invalid


def test_improperly_configured_is_both() -> None:
    error = ImproperlyConfigured("wrong")
    assert isinstance(error, celery.exceptions.ImproperlyConfigured)
    assert isinstance(error, click.ClickException)
    assert str(error) == "wrong"


def test_a_command_prints_one_line_and_exits_with_1() -> None:
    @click.command()
    def start() -> None:
        raise invalid("strategies_pool", "forks", "must be one of prefork, threads")

    result = CliRunner().invoke(start)
    assert result.exit_code == 1
    assert result.output == ("Error: strategies_pool = 'forks': must be one of prefork, threads\n")


def test_a_message_is_one_line_of_bounded_length() -> None:
    class Odd:
        def __repr__(self) -> str:
            return "odd\nthing"

    assert str(invalid("s", Odd(), "must be even")) == "s = odd thing: must be even"
    assert len(str(invalid("s", "x" * 10_000, "must be short"))) < 300


@pytest.mark.parametrize("transport", ["amqp", "memory", "sqs"])
def test_not_our_transport_names_the_transport_and_what_is_supported(transport: str) -> None:
    error = NotOurTransport(transport)
    assert isinstance(error, ImproperlyConfigured)
    for text in (transport, "redis://", "rediss://", "redis+socket://", "sentinel://"):
        assert text in str(error)
    assert error.transport == transport


@pytest.mark.parametrize("error", [ImproperlyConfigured("wrong"), NotOurTransport("amqp")])
def test_errors_survive_pickling(error: ImproperlyConfigured) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
