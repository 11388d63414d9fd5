"""The numbers that Python and C++ give to the same names are compared when the native engine is bound."""

import pytest

import polycast
from polycast.engine import choice


@pytest.mark.parametrize("engine", ["native"], indirect=True)
@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("change", ["other number", "missing", "more"])
def test_a_name_with_another_number_is_refused(engine, place, change, monkeypatch):
    from polycast.engine.native import engine as native

    bound = choice.choose_engine()
    numbers = dict(native._NUMBERS[place])
    first, *_, last = numbers
    if change == "other number":
        numbers[first], numbers[last] = numbers[last], numbers[first]
    elif change == "missing":
        del numbers[last]
    else:
        numbers["NEW"] = 99
    monkeypatch.setattr(native, "_NUMBERS", (*native._NUMBERS[:place], numbers, *native._NUMBERS[place + 1 :]))
    with pytest.raises(RuntimeError, match=r"Python and C\+\+ number \w+ and what is listed with it differently"):
        type(bound)(bound._extension, "", {})
    with polycast.autocast("cpu"):  # on the engine that was bound before
        pass
