"""Events: who is notified, when, and on which thread."""

import threading

import pytest

from polycast.plugin import events


def test_listeners_are_called_in_order_until_they_are_removed():
    event, heard = events.Event(), []
    event.add(lambda value: heard.append(("first", value)))
    event.add(heard.append)
    event.notify(1)
    event.remove(heard.append)
    event.notify(2)
    assert heard == [("first", 1), 1, ("first", 2)]


def test_a_listener_of_a_thread_hears_no_other(in_thread):
    event, heard = events.Event(), []
    event.add(heard.append, threading.get_ident())
    in_thread(lambda: event.notify("other"))
    event.notify("this")
    assert heard == ["this"]
    assert (event.here(), in_thread(event.here), bool(event)) == (True, False, True)
    event.remove(heard.append)
    assert not event


def test_start_and_stop_are_called_for_the_first_and_the_last_listener():
    calls = []
    event = events.Event(lambda: calls.append("start"), lambda: calls.append("stop"))
    for listener in ("a", "b"):
        event.add(listener)
    for listener in ("a", "absent", "b"):
        event.remove(listener)
    assert calls == ["start", "stop"]


def test_a_listener_may_remove_itself_while_it_is_notified():
    event, heard = events.Event(), []

    def once(value):
        heard.append(value)
        event.remove(once)

    event.add(once)
    event.add(heard.append)
    event.notify(1)
    assert heard == [1, 1]


def test_an_exception_of_a_listener_reaches_the_notifier():
    event = events.Event()
    event.add(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        event.notify()


def test_a_listener_hears_the_end_of_a_block_that_raises():
    event, heard = events.Event(), []
    event.add(heard.append)
    with pytest.raises(ZeroDivisionError), event.during():
        raise ZeroDivisionError
    assert heard == [True, False]


def test_a_listener_that_is_added_in_a_block_does_not_hear_its_end():
    event, heard = events.Event(), []
    with event.during():
        event.add(heard.append)
    assert heard == []
