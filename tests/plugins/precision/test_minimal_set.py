"""The search for a minimal set, with made-up evaluations, and the globs of candidates in policies."""

import math
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polycast.policy.globs import compile_glob
from polycast_plugins.precision.candidates import glob_of
from polycast_plugins.precision.minimal_set import OutOfBudget, minimal_set

NAMES = [f"m{number}" for number in range(200)]


class Asked:
    """Evaluates each set once, up to a budget, and remembers the results."""

    def __init__(self, is_enough, budget=math.inf):
        self.is_enough, self.budget, self.answers = is_enough, budget, {}

    def __call__(self, members):
        if members not in self.answers:
            if len(self.answers) >= self.budget:
                raise OutOfBudget
            self.answers[members] = self.is_enough(frozenset(members))
        return self.answers[members]


def needs(*culprits):
    return lambda members: members >= set(culprits)


@pytest.mark.slow
@given(st.integers(1, 200), st.data())
@settings(max_examples=200, deadline=None)
def test_planted_culprits_are_found_and_nothing_else_in_few_evaluations(size, data):
    names = NAMES[:size]
    culprits = data.draw(st.sets(st.sampled_from(names), max_size=5))
    asked = Asked(needs(*culprits))
    assert minimal_set(names, asked) == (tuple(n for n in names if n in culprits), True)
    prefix = max((names.index(each) + 1 for each in culprits), default=1)
    levels = math.ceil(math.log2(prefix)) + 2
    assert len(asked.answers) <= 2 * levels + 2 * (len(culprits) + 1) * levels


@given(st.lists(st.sets(st.sampled_from(NAMES[:12]), max_size=4), min_size=1, max_size=6))
@settings(max_examples=200, deadline=None)
def test_one_minimal_set_of_several_is_found(ways):
    def is_enough(members):
        return any(members >= way for way in ways)

    found = minimal_set(NAMES[:12], Asked(is_enough))
    members = frozenset(found.members)
    assert is_enough(members)
    assert not any(is_enough(members - {each}) for each in members)


@given(st.integers(0, 2**32), st.integers(2, 12))
@settings(max_examples=200, deadline=None)
def test_nothing_is_assumed_about_the_evaluations(seed, size):
    """The result, and each set with one member less, were evaluated, even if larger sets can be worse."""
    names = NAMES[:size]
    asked = Asked(lambda members: len(members) == size or zlib.crc32(f"{seed} {sorted(members)}".encode()) % 3 == 0)
    found = minimal_set(names, asked)
    assert found.is_minimal
    assert asked.answers[found.members]
    for name in found.members:
        assert asked.answers[tuple(each for each in found.members if each != name)] is False


@given(st.integers(2, 60), st.sets(st.sampled_from(NAMES[:64]), max_size=4))
@settings(max_examples=200, deadline=None)
def test_the_result_within_a_budget_is_sufficient(budget, culprits):
    asked = Asked(needs(*culprits), budget)
    found = minimal_set(NAMES[:64], asked)
    assert len(asked.answers) <= budget
    assert asked.answers[found.members]
    assert found.is_minimal <= (set(found.members) == culprits)


def test_nothing_is_found_if_even_the_full_set_is_insufficient():
    assert minimal_set(NAMES, Asked(lambda members: False)) is None


@pytest.mark.parametrize("budget", [0, 1])
def test_a_budget_below_two_finds_nothing(budget):
    assert minimal_set(NAMES, Asked(needs("m1"), budget)) in (None, (tuple(NAMES), False))


def test_a_good_order_saves_evaluations():
    last, first = Asked(needs("m199")), Asked(needs("m0"))
    minimal_set(NAMES, last)
    minimal_set(NAMES, first)
    assert len(first.answers) == 3  # all, none, the first
    assert len(last.answers) < 40


# ---- Globs.

PARTS = st.text(st.characters(exclude_characters=".", exclude_categories=["Cs"]), min_size=1)


@settings(deadline=None)
@given(st.lists(PARTS, min_size=1, max_size=3).map(".".join), st.lists(PARTS, max_size=5))
def test_the_glob_of_a_name_matches_only_the_name(name, others):
    assert not glob_of(name).startswith("class:")
    assert list(filter(compile_glob(glob_of(name)), dict.fromkeys([name, *others]))) == [name]


def test_the_glob_of_a_name_of_special_characters_matches_it(subtests):
    for name in ["*", "**", "a[0]", "[0-11]", "{a,b}", "class:torch.nn.Linear", "a?", "]", "[", "[]"]:
        with subtests.test(name=name):
            assert list(filter(compile_glob(glob_of(name)), [name, "a", "b", "0", "a0", "torch"])) == [name]
