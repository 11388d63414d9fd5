"""Of tests with three or more parameters run few combinations, which hold each pair of values."""

import itertools
from pathlib import Path

import pytest

from .collecting import ENGINES_DIFFER, FIRST, redundant


def pairs(combinations):
    return {pair for values in combinations for pair in itertools.combinations(enumerate(values), 2)}


@pytest.mark.parametrize("counts", [(2, 2, 2), (7, 6, 2, 3, 2), (15, 2, 3, 2, 2)], ids=str)
def test_each_pair_is_held_by_few(counts):
    every = list(itertools.product(*map(range, counts)))
    left_out = set(redundant(every))
    left = [values for n, values in enumerate(every) if n not in left_out]
    assert pairs(left) == pairs(every)
    most, second = sorted(counts)[-2:][::-1]
    assert len(left) <= 1.3 * most * second


def test_combinations_that_are_not_there_are_not_asked_for():
    every = [values for values in itertools.product("abc", "de", "fg") if values[:2] != ("a", "d")]
    left = [values for n, values in enumerate(every) if n not in redundant(every)]
    assert pairs(left) == pairs(every)


@pytest.mark.parametrize("combinations", [[("a",), ("b",)], list(itertools.product("abc", "de"))], ids=len)
def test_of_two_parameters_none_is_left_out(combinations):
    assert redundant(combinations) == []


def test_what_is_apart_needs_no_pair():
    every = list(itertools.product(["native", "reference"], "abc"))
    left = [values for n, values in enumerate(every) if n not in redundant(every, {"native", "reference"})]
    assert left == [("native", "a"), ("native", "c"), ("reference", "b")]


def test_the_tests_that_run_first_or_on_both_engines_exist():
    root = Path(__file__).parent.parent
    assert [name for name in (*FIRST, *ENGINES_DIFFER) if not list(root.glob(f"{name}*"))] == []
