"""Changes to modules: made where they are imported already, or once they are, and taken back."""

import importlib
import sys
import threading

import pytest

from polycast.compilers.on_import import Changes

NAME = "module_of_the_test_of_changes"


@pytest.fixture(name="module_file")
def _module_file(tmp_path, monkeypatch):
    """The file of a module that can be imported."""
    path = tmp_path / f"{NAME}.py"
    path.write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield path
    sys.modules.pop(NAME, None)


@pytest.fixture(name="changes")
def _changes(refusals):
    def change(changes):
        changes.replace(sys.modules[NAME], "value", sys.modules[NAME].value + 1)

    changes = Changes({NAME: change}, refusals.append)
    yield changes
    changes.take_back()


@pytest.fixture(name="refusals")
def _refusals():
    return []


@pytest.mark.usefixtures("module_file")
@pytest.mark.parametrize("imported", [True, False])
def test_a_module_is_changed_once_and_given_back(changes, imported):
    if imported:
        importlib.import_module(NAME)
    changes.make()
    changes.make()
    assert (NAME in sys.modules) is imported
    module = importlib.import_module(NAME)
    assert module.value == 2
    changes.take_back()
    assert (module.value, changes in sys.meta_path) == (1, False)
    changes.make()
    assert module.value == 2


def test_a_module_keeps_its_loader_and_its_source(changes, module_file):
    changes.make()
    assert importlib.util.find_spec(NAME).loader.get_source(NAME) == "value = 1\n"
    module = importlib.import_module(NAME)
    assert type(module.__loader__) is type(module.__spec__.loader) is type(sys.modules["pytest"].__loader__)
    assert module.__loader__.get_source(NAME) == module_file.read_text()


@pytest.mark.usefixtures("module_file")
def test_what_somebody_else_has_replaced_since_is_left_to_him(changes):
    changes.make()
    module = importlib.import_module(NAME)
    module.value = 7
    changes.take_back()
    assert module.value == 7


def test_a_module_that_is_not_as_expected_is_refused_with_a_reason(changes, module_file, refusals):
    module_file.write_text("other = 1\n")
    changes.make()
    assert not hasattr(importlib.import_module(NAME), "value")
    assert [refusal.startswith(f"{NAME}: AttributeError: ") for refusal in refusals] == [True]


def test_a_module_that_asks_for_its_own_change_while_it_is_imported_gets_it_when_asked_again(changes, module_file):
    sys.modules["polycast_test_changes"] = changes
    module_file.write_text("import sys\nsys.modules['polycast_test_changes'].make()\nvalue = 1\n")
    try:
        module = importlib.import_module(NAME)
        assert module.value == 1
        changes.make()
        assert module.value == 2
    finally:
        del sys.modules["polycast_test_changes"]


def test_a_module_that_another_thread_is_importing_is_waited_for(changes, module_file):
    importing, go_on = threading.Event(), threading.Event()
    sys.modules["polycast_test_events"] = (importing, go_on)
    module_file.write_text(
        "import sys\nimporting, go_on = sys.modules['polycast_test_events']\n"
        "importing.set()\ngo_on.wait(60)\nvalue = 1\n"
    )
    threads = [threading.Thread(target=importlib.import_module, args=(NAME,)), threading.Thread(target=changes.make)]
    try:
        threads[0].start()
        importing.wait(60)
        threads[1].start()
        go_on.set()
        for thread in threads:
            thread.join()
        assert sys.modules[NAME].value == 2
    finally:
        del sys.modules["polycast_test_events"]


@pytest.mark.usefixtures("module_file")
def test_a_module_that_another_finder_has_found_first_is_changed_at_the_next_call(changes, monkeypatch):
    changes.make()
    monkeypatch.setattr(sys, "meta_path", [importlib.machinery.PathFinder, *sys.meta_path])
    module = importlib.import_module(NAME)
    assert module.value == 1
    changes.make()
    assert module.value == 2


class Noticed(str):
    """The name of a module, that does something when it is looked up."""

    def __hash__(self):
        self.then()
        return super().__hash__()

    def then(self):
        pass


def test_a_module_may_be_changed_by_another_thread_while_those_that_wait_are_looked_through(refusals):
    first = Noticed("module_that_nobody_imports")
    changes = Changes({first: lambda _: None, NAME: lambda _: None}, refusals.append)
    changes.make()
    first.then = lambda: changes.change(NAME)
    try:
        changes.make()
    finally:
        changes.take_back()
    assert refusals == []
