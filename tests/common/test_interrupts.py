"""Exceptions of signal handlers are told from those of the code that they interrupt."""

import signal
import sys

import pytest

from polycast.common.interrupts import is_interrupt


def failing(*_):
    raise ValueError("of the code")


def test_an_exception_of_a_handler_is_an_interrupt():
    before = signal.signal(signal.SIGUSR1, failing)
    try:
        with pytest.raises(ValueError, match="of the code") as raised:
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert is_interrupt(raised.value)


@pytest.mark.parametrize("arguments", [(), (1, None), (1, "frame")])
def test_any_other_exception_is_none(arguments):
    with pytest.raises(ValueError, match="of the code") as raised:
        failing(*arguments)
    assert not is_interrupt(raised.value)


def test_a_function_that_is_given_a_frame_is_no_handler():
    with pytest.raises(ValueError, match="of the code") as raised:
        failing(sys._getframe())
    assert not is_interrupt(raised.value)
