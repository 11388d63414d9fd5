"""Changes to modules: made at once or at their import, and undone."""

import functools
import importlib
import sys
import threading

import pytest

from polycast.torch_internals.patcher import Change, Feature, Patcher

NAME = "module_of_the_test_of_changes"


@pytest.fixture(name="module_file")
def _module_file(tmp_path, monkeypatch):
    """The file of a module that can be imported."""
    path = tmp_path / f"{NAME}.py"
    path.write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield path
    sys.modules.pop(NAME, None)


def feature(*changes, **options):
    return Feature("it", "lost", tuple(Change(name, (), by) for name, by in changes), **options)


def increase(patch):
    patch.replace(sys.modules[NAME], "value", sys.modules[NAME].value + 1)


@pytest.fixture(name="it")
def _it(refusals):
    return feature((NAME, increase), on_refusal=refusals.append)


@pytest.fixture(name="patcher")
def _patcher(it):
    patcher = Patcher()
    yield patcher
    patcher.undo(it)


@pytest.fixture(name="refusals")
def _refusals():
    return []


@pytest.mark.usefixtures("module_file")
@pytest.mark.parametrize("imported", [True, False])
def test_a_module_is_changed_once_and_restored(it, patcher, imported):
    if imported:
        importlib.import_module(NAME)
    patcher.make(it)
    patcher.make(it)
    assert (NAME in sys.modules) is imported
    module = importlib.import_module(NAME)
    assert module.value == 2
    patcher.undo_all()
    assert (module.value, patcher in sys.meta_path) == (1, False)
    patcher.make(it)
    assert module.value == 2


def test_a_module_keeps_its_loader_and_its_source(it, patcher, module_file):
    patcher.make(it)
    assert importlib.util.find_spec(NAME).loader.get_source(NAME) == "value = 1\n"
    module = importlib.import_module(NAME)
    assert type(module.__loader__) is type(module.__spec__.loader) is type(sys.modules["pytest"].__loader__)
    assert module.__loader__.get_source(NAME) == module_file.read_text()


@pytest.mark.usefixtures("module_file")
def test_undo_leaves_what_others_have_replaced_since(it, patcher):
    patcher.make(it)
    module = importlib.import_module(NAME)
    module.value = 7
    patcher.undo_all()
    assert module.value == 7


def test_a_module_that_is_not_as_expected_is_refused_with_a_reason(it, patcher, module_file, refusals):
    module_file.write_text("other = 1\n")
    patcher.make(it)
    assert not hasattr(importlib.import_module(NAME), "value")
    assert [refusal.startswith(f"{NAME}: AttributeError: ") for refusal in refusals] == [True]


def test_a_change_that_is_made_during_the_import_of_its_module_waits_for_the_next_call(it, patcher, module_file):
    sys.modules["polycast_test_changes"] = functools.partial(patcher.make, it)
    module_file.write_text("import sys\nsys.modules['polycast_test_changes']()\nvalue = 1\n")
    try:
        module = importlib.import_module(NAME)
        assert module.value == 1
        patcher.make(it)
        assert module.value == 2
    finally:
        del sys.modules["polycast_test_changes"]


def test_make_waits_for_a_module_that_another_thread_is_importing(it, patcher, module_file):
    importing, go_on = threading.Event(), threading.Event()
    sys.modules["polycast_test_events"] = (importing, go_on)
    module_file.write_text(
        "import sys\nimporting, go_on = sys.modules['polycast_test_events']\n"
        "importing.set()\ngo_on.wait(60)\nvalue = 1\n"
    )
    threads = [
        threading.Thread(target=importlib.import_module, args=(NAME,)),
        threading.Thread(target=patcher.make, args=(it,)),
    ]
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
def test_a_module_that_an_earlier_finder_finds_is_changed_at_the_next_call(it, patcher, monkeypatch):
    patcher.make(it)
    monkeypatch.setattr(sys, "meta_path", [importlib.machinery.PathFinder, *sys.meta_path])
    module = importlib.import_module(NAME)
    assert module.value == 1
    patcher.make(it)
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
    patcher = Patcher()
    it = feature((first, lambda _: None), (NAME, lambda _: None), on_refusal=refusals.append)
    patcher.make(it)
    first.then = lambda: patcher.change(NAME)
    try:
        patcher.make(it)
    finally:
        patcher.undo_all()
    assert refusals == []


def test_a_refusal_warns_of_the_loss(module_file):
    module_file.write_text("other = 1\n")
    importlib.import_module(NAME)
    patcher = Patcher()
    it = feature((NAME, increase))
    with pytest.warns(
        UserWarning, match=rf"does not support the internals of this torch .*{NAME}: AttributeError.*: lost$"
    ):
        assert not patcher.make(it)
    assert patcher.is_refused(it)
    assert not patcher.make(it)
    patcher.undo_all()
    assert not patcher.is_refused(it)


@pytest.mark.usefixtures("module_file")
def test_a_change_that_fails_half_way_is_undone(refusals):
    def change(patch):
        increase(patch)
        raise NotImplementedError("not this one")

    module = importlib.import_module(NAME)
    Patcher().make(feature((NAME, change), on_refusal=refusals.append))
    assert (module.value, refusals) == (1, [f"{NAME}: NotImplementedError: not this one"])


@pytest.mark.usefixtures("module_file")
def test_a_feature_without_a_loss_raises_and_can_be_made_again():
    def change(patch):
        increase(patch)
        if module.value == 2:
            raise ValueError("not now")

    module = importlib.import_module(NAME)
    patcher = Patcher()
    it = Feature("it", "", (Change(NAME, (), change),))
    with pytest.raises(ValueError, match="not now"):
        patcher.make(it)
    assert (module.value, patcher in sys.meta_path) == (1, False)
    module.value = 5
    assert patcher.make(it)
    assert module.value == 6
    patcher.undo_all()


@pytest.mark.usefixtures("module_file")
def test_features_are_undone_one_by_one_and_undo_all_leaves_those_that_outlive_it():
    def double(patch):
        patch.replace(module, "twice", 2 * module.value)

    module = importlib.import_module(NAME)
    patcher, other = Patcher(), feature((NAME, double), outlives_uninstall=True)
    patcher.make(feature((NAME, increase)))
    patcher.make(other)
    assert (module.value, module.twice) == (2, 4)
    patcher.undo_all()
    assert (module.value, module.twice, patcher in sys.meta_path) == (1, 4, True)
    patcher.undo(other)
    assert (hasattr(module, "twice"), patcher in sys.meta_path) == (False, False)


@pytest.mark.usefixtures("module_file")
@pytest.mark.parametrize("before", [{}, {"key": 1}])
def test_items_of_dicts_are_replaced_and_restored(before):
    module = importlib.import_module(NAME)
    module.items = dict(before)
    patcher = Patcher()
    it = feature((NAME, lambda patch: patch.replace_item(module.items, "key", 2)))
    patcher.make(it)
    assert module.items == {"key": 2}
    patcher.undo_all()
    assert module.items == before


@pytest.mark.usefixtures("module_file")
def test_a_feature_calls_a_function_once_it_has_been_undone():
    module = importlib.import_module(NAME)
    seen = []
    patcher = Patcher()
    it = feature((NAME, increase), on_undo=lambda: seen.append(module.value))
    patcher.undo(it)
    assert seen == []  # it was not made
    patcher.make(it)
    patcher.undo_all()
    patcher.undo_all()
    assert seen == [1]


@pytest.mark.usefixtures("module_file")
def test_undo_all_begins_with_the_feature_that_was_made_last():
    module = importlib.import_module(NAME)
    patcher = Patcher()
    for _ in range(2):
        patcher.make(feature((NAME, increase)))
    assert module.value == 3
    patcher.undo_all()
    assert module.value == 1


def test_the_features_that_are_made_are_listed_with_the_reasons_of_refusals(it, patcher, module_file):
    other = feature(("module_that_nobody_imports", increase))
    module_file.write_text("other = 1\n")
    importlib.import_module(NAME)
    patcher.make(it)
    patcher.make(other)
    made = patcher.made()
    assert (list(made), made[other]) == ([it, other], "")
    assert made[it].startswith(f"{NAME}: AttributeError: ")
