"""`computed_once`: values that are kept, and no lock that threads or a forked child could wait for."""

import threading

from polycast.policy.computed_once import computed_once


class Number:
    def __init__(self, compute):
        self.compute = compute

    @computed_once
    def value(self):
        """What it comes to."""
        return self.compute()


def test_a_value_is_computed_at_its_first_use_and_kept():
    computed = []
    number = Number(lambda: computed.append(1) or object())
    assert computed == []
    assert number.value is number.value
    assert computed == [1]


def test_its_docstring_is_the_functions():
    assert Number.value.__doc__ == "What it comes to."


def test_a_thread_that_computes_one_value_holds_up_none_that_computes_another():
    goes_on = threading.Event()
    slow = threading.Thread(target=lambda: Number(lambda: goes_on.wait(60)).value)
    fast = threading.Thread(target=lambda: Number(lambda: 1).value)
    slow.start()
    fast.start()
    fast.join(30)
    held_up = fast.is_alive()
    goes_on.set()
    slow.join()
    fast.join()
    assert not held_up


def test_threads_that_compute_one_value_at_once_get_the_same():
    both = threading.Barrier(2)
    number, found = Number(lambda: [both.wait(60)]), []
    threads = [threading.Thread(target=lambda: found.append(number.value)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1] is number.value
