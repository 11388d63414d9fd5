"""Import code of another package: what it prints goes to stderr, and what it changes in torch is put back."""

import io
import sys
import threading

import pytest
import torch

from polycast.torch_internals.foreign_import import foreign_import

CHANGES = {
    "the default dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "the default device": (lambda: torch.set_default_device("meta"), torch.get_default_device),
    "the number of threads": (lambda: torch.set_num_threads(torch.get_num_threads() + 1), torch.get_num_threads),
    "the grad mode": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "deterministic algorithms": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        torch.get_deterministic_debug_mode,
    ),
    "the random numbers": (lambda: torch.manual_seed(7), torch.initial_seed),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_torch_is_put_back_and_reported(what, capsys):
    change, read = CHANGES[what]
    before = read()
    with foreign_import("acme 1.0 (acme)"):
        change()
        assert read() != before
    assert read() == before
    expected = f"polycast: the import of acme 1.0 (acme) changed torch, which is put back: {what}.\n"
    assert capsys.readouterr() == ("", expected)


def test_changes_are_put_back_after_an_exception(capsys):
    def failing():
        torch.set_default_dtype(torch.float64)
        raise ValueError("no firmware")

    with pytest.raises(ValueError, match="no firmware"), foreign_import("acme"):
        failing()
    assert torch.get_default_dtype() is torch.float32
    assert "default dtype" in capsys.readouterr().err


def test_numbers_that_another_thread_draws_meanwhile_are_not_drawn_again(in_thread, capsys):
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with foreign_import("acme"):
            in_thread(lambda: torch.rand(3))
            state = torch.get_rng_state()
    finally:
        stop.set()
        thread.join()
    assert torch.equal(torch.get_rng_state(), state)
    assert capsys.readouterr().err == ""


def test_the_callers_default_device_stays():
    torch.set_default_device("meta")
    try:
        with torch.overrides._pop_mode_temporarily(), foreign_import("acme"):
            torch.set_default_device("cpu")
        assert torch.ones(1).device.type == "meta"
    finally:
        torch.set_default_device(None)
    assert torch._C._len_torch_function_stack() == 0


def test_what_changes_nothing_says_nothing(capsys):
    with foreign_import("acme"):
        torch.set_default_dtype(torch.float64)
        torch.set_default_dtype(torch.float32)
    assert capsys.readouterr() == ("", "")


def test_prints_go_to_stderr_on_this_thread_only(in_thread, capsys):
    stdout = sys.stdout
    with foreign_import("acme"):
        print("imported", flush=True)
        kept = sys.stdout
        in_thread(lambda: print("computed"))
    print("after", file=kept)
    assert sys.stdout is stdout
    assert capsys.readouterr() == ("computed\nafter\n", "imported\n")


def test_imports_on_two_threads_leave_stdout_as_it_was(in_thread, capsys):
    stdout = sys.stdout
    first, second = foreign_import("one"), foreign_import("two")
    first.__enter__()
    in_thread(second.__enter__)
    first.__exit__(None, None, None)
    print("after one")
    in_thread(lambda: second.__exit__(None, None, None))
    assert sys.stdout is stdout
    assert capsys.readouterr().out == "after one\n"


def test_a_stdout_that_the_package_replaces_stays(monkeypatch, capsys):
    class Wrapper:
        def __init__(self, stream):
            self.write, self.flush = (lambda text: stream.write(text.upper())), stream.flush

    monkeypatch.setattr(sys, "stdout", sys.stdout)
    with foreign_import("acme"):
        sys.stdout = Wrapper(sys.stdout)
        print("imported")
    print("after")
    assert capsys.readouterr() == ("AFTER\n", "IMPORTED\n")


def test_what_a_package_makes_of_stdout_writes_to_stdout_afterwards(monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdout", open(1, "w", closefd=False))  # noqa: SIM115
    with foreign_import("acme"):
        write = sys.stdout.write
        write("imp")
        sys.stdout.writelines(["orted", "\n"])
        wrapper = io.TextIOWrapper(sys.stdout.detach(), encoding="ascii")
        sys.stdout = wrapper
    print("after", flush=True)
    assert not sys.stderr.closed
    assert capfd.readouterr() == ("after\n", "imported\n")
    with pytest.raises(ValueError, match="detached"):
        write("later")


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_program_without_a_stream(monkeypatch, closed):
    monkeypatch.setattr(sys, closed, None)
    with foreign_import("acme"):
        print("imported")
        torch.set_default_dtype(torch.float64)
    assert torch.get_default_dtype() is torch.float32
