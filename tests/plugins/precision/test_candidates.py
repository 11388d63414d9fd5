"""The globs of candidates in the policies that are found."""

from hypothesis import given, settings
from hypothesis import strategies as st

from polycast.policy.globs import compile_glob
from polycast_plugins.precision.candidates import glob_of

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
