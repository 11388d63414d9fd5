"""Changes to modules: made at once or at their import, and undone."""

import functools
import importlib
import sys
import threading

import pytest

from polycast.torch_internals import patcher
from polycast.torch_internals.patcher import Feature, undo_all

NAME = "module_of_the_test_of_changes"


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """Hide the features that other tests have made."""
    monkeypatch.setattr(patcher, "_patches", {})
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if each is not patcher._finder])


@pytest.fixture(name="module_file", autouse=True)
def _module_file(tmp_path, monkeypatch):
    """The file of a module that can be imported."""
    path = tmp_path / f"{NAME}.py"
    path.write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield path
    sys.modules.pop(NAME, None)


@pytest.fixture
def module():
    return importlib.import_module(NAME)


def feature(*changes, lost="lost", **options):
    return Feature("it", lost, [(name, (), by) for name, by in changes], **options)


def increase(patch):
    patch.replace(sys.modules[NAME], "value", sys.modules[NAME].value + 1)


@pytest.fixture
def refusals():
    return []


@pytest.fixture
def it(refusals):
    return feature((NAME, increase), on_refusal=refusals.append)


def is_looking():
    return patcher._finder in sys.meta_path


@pytest.mark.parametrize("imported", [True, False])
def test_a_module_is_changed_once_and_restored(it, imported):
    if imported:
        importlib.import_module(NAME)
    it.make()
    it.make()
    assert (NAME in sys.modules) is imported
    module = importlib.import_module(NAME)
    assert module.value == 2
    undo_all()
    assert (module.value, is_looking()) == (1, False)
    it.make()
    assert module.value == 2


def test_a_module_keeps_its_loader_and_its_source(it, module_file):
    it.make()
    assert importlib.util.find_spec(NAME).loader.get_source(NAME) == "value = 1\n"
    module = importlib.import_module(NAME)
    assert type(module.__loader__) is type(module.__spec__.loader) is type(sys.modules["pytest"].__loader__)
    assert module.__loader__.get_source(NAME) == module_file.read_text()


def test_undo_leaves_what_others_have_replaced_since(it):
    it.make()
    module = importlib.import_module(NAME)
    module.value = 7
    undo_all()
    assert module.value == 7


def test_a_module_that_is_not_as_expected_is_refused_with_a_reason_which_is_listed(it, module_file, refusals):
    module_file.write_text("other = 1\n")
    other = feature(("module_that_nobody_imports", increase))
    it.make()
    other.make()
    assert not hasattr(importlib.import_module(NAME), "value")
    (refusal,) = refusals
    assert refusal.startswith(f"{NAME}: AttributeError: ")
    assert list(Feature.made().items()) == [(it, refusal), (other, "")]


def run_in_the_module(module_file, monkeypatch, function):
    """Write a module that calls a function before it has its value."""
    monkeypatch.setitem(sys.modules, "polycast_test_changes", function)
    module_file.write_text("import sys\nsys.modules['polycast_test_changes']()\nvalue = 1\n")


def test_a_change_that_is_made_during_the_import_of_its_module_waits_for_the_next_call(it, module_file, monkeypatch):
    run_in_the_module(module_file, monkeypatch, it.make)
    module = importlib.import_module(NAME)
    assert module.value == 1
    it.make()
    assert module.value == 2


def test_make_waits_for_a_module_that_another_thread_is_importing(it, module_file, monkeypatch):
    importing, go_on = threading.Event(), threading.Event()
    run_in_the_module(module_file, monkeypatch, lambda: (importing.set(), go_on.wait(60)))
    threads = [threading.Thread(target=importlib.import_module, args=(NAME,)), threading.Thread(target=it.make)]
    threads[0].start()
    importing.wait(60)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join()
    assert sys.modules[NAME].value == 2


def test_a_module_that_an_earlier_finder_finds_is_changed_at_the_next_call(it, monkeypatch):
    it.make()
    monkeypatch.setattr(sys, "meta_path", [importlib.machinery.PathFinder, *sys.meta_path])
    module = importlib.import_module(NAME)
    assert module.value == 1
    it.make()
    assert module.value == 2


class Noticed(str):
    """A module name that calls `then` at each lookup."""

    def __hash__(self):
        self.then()
        return super().__hash__()

    def then(self):
        pass


def test_another_thread_may_change_a_module_during_make(refusals):
    first = Noticed("module_that_nobody_imports")
    it = feature((first, lambda _: None), (NAME, lambda _: None), on_refusal=refusals.append)
    it.make()
    first.then = functools.partial(it._change, patcher._patches[it], NAME)
    it.make()
    del first.then
    assert refusals == []


def test_a_refusal_warns_of_the_loss(module):
    del module.value
    it = feature((NAME, increase))
    text = rf"does not support the internals of this torch .*{NAME}: AttributeError.*: lost$"
    with pytest.warns(UserWarning, match=text):
        assert not it.make()
    assert it.is_refused()
    assert not it.make()
    undo_all()
    assert not it.is_refused()


def test_a_change_that_fails_half_way_is_undone(module, refusals):
    def change(patch):
        increase(patch)
        raise NotImplementedError("not this one")

    feature((NAME, change), on_refusal=refusals.append).make()
    assert (module.value, refusals) == (1, [f"{NAME}: NotImplementedError: not this one"])


def test_a_feature_without_a_loss_raises_and_can_be_made_again(module):
    def change(patch):
        increase(patch)
        if module.value == 2:
            raise ValueError("not now")

    it = feature((NAME, change), lost="")
    with pytest.raises(ValueError, match="not now"):
        it.make()
    assert (module.value, is_looking(), it.is_made()) == (1, False, False)
    module.value = 5
    assert it.make()
    assert module.value == 6


def test_features_are_undone_one_by_one_and_undo_all_leaves_those_that_outlive_it(module):
    other = feature((NAME, lambda patch: patch.replace(module, "twice", 2 * module.value)), outlives_uninstall=True)
    feature((NAME, increase)).make()
    other.make()
    assert (module.value, module.twice) == (2, 4)
    undo_all()
    assert (module.value, module.twice, is_looking()) == (1, 4, True)
    other.undo()
    assert (hasattr(module, "twice"), is_looking()) == (False, False)


@pytest.mark.parametrize("before", [{}, {"key": 1}])
def test_items_of_dicts_are_replaced_and_restored(before):
    items = dict(before)
    feature(("sys", lambda patch: patch.replace_item(items, "key", 2))).make()
    assert items == {"key": 2}
    undo_all()
    assert items == before


def test_a_feature_calls_a_function_once_it_has_been_undone(module):
    seen = []
    it = feature((NAME, increase), on_undo=lambda: seen.append(module.value))
    it.undo()
    assert seen == []  # it was not made
    it.make()
    undo_all()
    undo_all()
    assert seen == [1]


def test_undo_all_begins_with_the_feature_that_was_made_last(module):
    for _ in range(2):
        feature((NAME, increase)).make()
    assert module.value == 3
    undo_all()
    assert module.value == 1
