"""`cached_property`: computed once, without a lock that another thread or a forked child could wait for."""

import threading
from concurrent.futures import ThreadPoolExecutor

from polycast.common.cached_property import cached_property


class Number:
    def __init__(self, compute):
        self.compute = compute

    @cached_property
    def value(self):
        """The value."""
        return self.compute()


def test_a_value_is_computed_at_its_first_use():
    computed = []
    number = Number(lambda: computed.append(1) or object())
    assert computed == []
    assert number.value is number.value
    assert computed == [1]
    assert Number.value.__doc__ == "The value."


def test_threads_compute_the_values_of_several_instances_at_once():
    resume = threading.Event()
    slow = threading.Thread(target=lambda: Number(lambda: resume.wait(60)).value)
    fast = threading.Thread(target=lambda: Number(lambda: 1).value)
    slow.start()
    fast.start()
    fast.join(30)
    waits = fast.is_alive()
    resume.set()
    slow.join()
    fast.join()
    assert not waits


def test_threads_that_compute_a_value_at_once_get_the_same():
    barrier = threading.Barrier(2)
    number = Number(lambda: [barrier.wait(60)])
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: number.value, range(2))
    assert first is second is number.value
