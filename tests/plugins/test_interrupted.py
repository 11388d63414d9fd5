"""What a signal handler raises while a plugin is asked is the user's: it arrives, and is no answer of the plugin's."""

import functools
import signal

import pytest
import torch

import polycast
from polycast.plugins.signals import raised_by_signal_handler


class Timeout(TimeoutError):
    """What the handlers of these tests raise."""


def plain(number, frame):
    raise Timeout("time is up")


def with_unused_arguments(*_):
    plain(*_)


def dropping_its_arguments(number, frame):
    del number, frame
    raise Timeout("time is up")


def uninstalling_itself(number, frame):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise Timeout("time is up")


def with_more_arguments(seconds, number, frame):
    raise Timeout("time is up")


def wrapped(number, frame):
    raise Timeout("time is up")


@functools.wraps(wrapped)
def wrapper(*arguments, **keywords):
    del arguments
    raise Timeout("time is up")


class Handlers:
    def method(self, number, frame):
        del number, frame
        raise Timeout("time is up")

    @classmethod
    def class_method(cls, number, frame):
        del number, frame
        raise Timeout("time is up")

    def __call__(self, number, frame):
        del number, frame
        raise Timeout("time is up")


HANDLERS = {
    "a function": plain,
    "a function that calls another": lambda number, frame: plain(number, frame),
    "one that takes all": with_unused_arguments,
    "one that drops its arguments": dropping_its_arguments,
    "one that uninstalls itself": uninstalling_itself,
    "a partial": functools.partial(with_more_arguments, 10),
    "a decorated function": wrapper,
    "a method": Handlers().method,
    "a class method": Handlers.class_method,
    "an object": Handlers(),
    "a partial of an object": functools.partial(Handlers()),
}


@pytest.fixture
def handle():
    """Return a function that has a signal handled, until the test ends."""
    before = signal.getsignal(signal.SIGINT)
    yield functools.partial(signal.signal, signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def interrupted_once(answer):
    """Return a check that a signal comes to the first time, and that says `answer` afterwards."""
    calls = []

    def check(*_):
        calls.append(1)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        return answer

    return check


@pytest.mark.parametrize("handler", HANDLERS.values(), ids=HANDLERS)
def test_a_timeout_while_the_device_is_asked_for_arrives(hand_made, handle, handler):
    hand_made("cpu", availability=interrupted_once(polycast.Availability(True)))
    handle(handler)
    with pytest.raises(Timeout, match="time is up"):
        polycast.autocast("cpu")
    with polycast.autocast("cpu"):
        assert polycast.is_autocast_enabled("cpu")


ASKING = {
    "is_autocast_available": lambda: polycast.is_autocast_available("cpu"),
    "backends": polycast.backends,
    "grad_scaler": lambda: polycast.grad_scaler("cpu", torch.float16),
}


@pytest.mark.parametrize("ask", ASKING.values(), ids=ASKING)
def test_it_arrives_whoever_asks(hand_made, handle, ask):
    hand_made("cpu", availability=interrupted_once(polycast.Availability(True)))
    handle(plain)
    with pytest.raises(Timeout):
        ask()


def test_a_timeout_while_a_dtype_is_asked_for_arrives(hand_made, handle):
    hand_made("cpu", dtype_availability=interrupted_once(polycast.Availability(True)))
    handle(plain)
    with pytest.raises(Timeout):
        polycast.autocast("cpu", torch.bfloat16)


def test_a_timeout_while_a_capture_is_asked_for_ends_the_op(engine, hand_made, handle):
    hand_made("cpu", is_capturing=interrupted_once(False))
    handle(plain)
    x, weight = torch.ones(2, 2), torch.nn.Parameter(torch.ones(2, 2))
    with polycast.autocast("cpu"):
        with pytest.raises(Timeout):
            x @ weight
        assert (x @ weight).dtype is torch.float16


def test_the_exit_that_a_signal_asks_for_arrives(hand_made, handle):
    def leave(*_):
        raise SystemExit(3)

    hand_made("cpu", availability=interrupted_once(polycast.Availability(True)))
    handle(leave)
    with pytest.raises(SystemExit):
        polycast.autocast("cpu")


def test_what_the_plugin_raises_is_its_answer_though_a_handler_is_there(hand_made, handle):
    def refuse():
        raise Timeout("the driver does not answer")

    hand_made("cpu", availability=refuse)
    handle(plain)
    with pytest.warns(polycast.AutocastDisabledWarning, match="the driver does not answer"):
        polycast.autocast("cpu")


def test_what_the_plugin_makes_of_a_timeout_is_its_answer(hand_made, handle):
    def convert():
        try:
            signal.raise_signal(signal.SIGINT)
        except Timeout as error:
            raise RuntimeError("the driver hangs") from error

    hand_made("cpu", availability=convert)
    handle(plain)
    with pytest.warns(polycast.AutocastDisabledWarning, match="the driver hangs"):
        polycast.autocast("cpu")


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_a_device_is_asked_for_once(hand_made, dtype):
    answers = [polycast.Availability(False, "it is in use"), polycast.Availability(True)]
    hand_made("cpu", availability=lambda: answers.pop(0))
    with pytest.warns(polycast.AutocastDisabledWarning, match="cpu is not available: it is in use"):
        polycast.autocast("cpu", dtype)
    assert len(answers) == 1


def test_a_plugin_whose_import_is_interrupted_is_not_broken(run, plugin):
    plugin("acme-hpu", "hpu", "import signal\nsignal.raise_signal(signal.SIGINT)")
    script = """
    import signal
    def handler(number, frame):
        raise TimeoutError('time is up')
    signal.signal(signal.SIGINT, handler)
    first = error_of(polycast.get_backend, 'hpu')
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answer = [first, type(polycast.get_backend('hpu')).__name__]
    """
    assert run(script) == [["TimeoutError", "time is up"], "AcmeBackend"]


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler])
def test_an_exception_of_nobody_else_is_no_handlers(handle, handler):
    handle(handler)
    with pytest.raises(ValueError, match="12345 is not a valid Signals") as caught:
        signal.Signals(12345)
    assert not raised_by_signal_handler(caught.value)
