"""Exceptions of signal handlers are told from those of the code that they interrupt."""

import functools
import signal
import weakref

import pytest

from polycast.errors import is_interrupt


class Alarm(Exception):
    """The error that the handlers raise."""


def ring(number, frame):
    raise Alarm


def forgetful(number, frame):
    del number, frame
    raise Alarm


def rebinding(number, frame):
    number, frame = signal.Signals(number).name, frame.f_back
    raise Alarm(number)


def closure(number, frame):
    raise Alarm((lambda: (number, frame))())


def with_dead_proxy(number, frame):
    proxy = weakref.proxy(Handler())
    raise Alarm(type(proxy))


class Handler:
    """Handlers that are no functions."""

    def __call__(self, *given):
        raise Alarm

    def method(self, *given):
        self(*given)


HANDLERS = {
    "function": ring,
    "deletes its arguments": forgetful,
    "rebinds its arguments": rebinding,
    "closure": closure,
    "dead proxy": with_dead_proxy,
    "lambda": lambda *given: ring(*given),
    "partial": functools.partial(functools.partial(ring)),
    "object": Handler(),
    "method": Handler().method,
    "of Ctrl-C": signal.default_int_handler,
}


def interrupted():
    signal.raise_signal(signal.SIGUSR1)


def broken():
    raise OSError("no driver")


def chained(function, **cause):
    """Raise another exception than the one that a function raises."""
    try:
        function()
    except BaseException as error:
        raise ImportError from (error if cause.get("explicit") else None)


RAISERS = {
    "plain": interrupted,
    "cause": functools.partial(chained, interrupted, explicit=True),
    "context": functools.partial(chained, interrupted),
    "context of the context": functools.partial(chained, functools.partial(chained, interrupted)),
}


def answer(function):
    try:
        function()
    except BaseException as error:
        return is_interrupt(error)


@pytest.fixture
def install():
    """Return a function that installs a handler for the duration of the test."""
    before = signal.getsignal(signal.SIGUSR1)
    yield functools.partial(signal.signal, signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def test_an_exception_of_a_handler_and_one_raised_from_it_are_interrupts(install, subtests):
    for handler in HANDLERS.values():
        with subtests.test(handler=handler):
            install(handler)
            assert {name: answer(raiser) for name, raiser in RAISERS.items()} == dict.fromkeys(RAISERS, True)
            assert not answer(broken)
            assert not answer(functools.partial(chained, broken, explicit=True))


def test_an_error_while_an_interrupt_is_handled_is_none(install):
    install(ring)
    try:
        interrupted()
    except Alarm:
        answers = [answer(broken), answer(functools.partial(chained, broken))]
    assert answers == [False, False]
