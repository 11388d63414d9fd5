"""The numbers that Python and C++ give to the same names are compared when the native engine is bound."""

import pytest

import polycast
from polycast.engine import choice


@pytest.mark.parametrize("engine", ["native"], indirect=True)
@pytest.mark.parametrize("kind", ["policies", "not_prepacked", "actions", "prepack_ids", "settings"])
@pytest.mark.parametrize("change", ["other number", "missing", "more"])
def test_a_name_with_another_number_is_refused(engine, kind, change, monkeypatch):
    from polycast.engine.native import engine as native

    bound = choice.choose_engine()
    numbers = dict(native._NUMBERS[kind])
    first, *_, last = numbers
    if change == "other number":
        numbers[first], numbers[last] = numbers[last], numbers[first]
    elif change == "missing":
        del numbers[last]
    else:
        numbers["NEW"] = 99
    monkeypatch.setitem(native._NUMBERS, kind, numbers)
    with pytest.raises(RuntimeError, match=rf"Python and C\+\+ number the {kind} differently"):
        type(bound)(bound._extension, "", {})
    with polycast.autocast("cpu"):  # on the engine that was bound before
        pass
