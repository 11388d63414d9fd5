"""Rules that are recipes, in policy files."""

import pytest

from polycast import Int8, NoRecipe, Policy


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("none", 'head = "none"'),
        (NoRecipe(), 'head = "none"'),
        (Int8(), 'head = "int8"'),
        ("int8:tensor", 'head = "int8:tensor"'),
    ],
    ids=str,
)
def test_a_recipe_is_written_by_its_name_and_read_again(rule, line, tmp_path):
    policy = Policy(modules={"head": rule})
    policy.save(tmp_path / "policy.toml")
    assert line in policy.text().splitlines()
    assert Policy().diff(policy) == [f"+ modules.head = {line.partition(' = ')[2]}".replace('"', "'")]
    assert Policy.load(tmp_path / "policy.toml") == policy


def test_a_recipe_with_settings_is_written_as_a_table(tmp_path):
    policy = Policy(modules={"head": Int8(ops=("linear",), min_size=0)})
    policy.save(tmp_path / "policy.toml")
    assert Policy.load(tmp_path / "policy.toml") == policy
