"""The verdict that `polycast profile` draws from the times of a profile."""

import dataclasses

import pytest

from polycast_plugins.fastest.verdict import verdict


def said(which_is_fast, decoding, many_rows, training):
    uses = f"decoding: {decoding}; inference of many rows: {many_rows}; training: {training}"
    return f"{which_is_fast} here; {uses}"


FAST, SLOW = "bfloat16 is 2 times as fast as float32", "float32 is 2.5 times as fast as bfloat16"
QUICK_DTYPE, PLAIN, FASTEST = {"bfloat16": 0.5, "float16": 3.0}, "a plain region", "the recipe fastest"
SLOW_BUT_FOR_ONE_OP = {"bfloat16": {"conv2d": 0.5, "other": 2.5}, "bfloat16_kernel": 0.5}
VERDICTS = {
    "int4": ({**QUICK_DTYPE, "int8": 0.2, "int4": 0.1}, said(FAST, "int4", "int4", PLAIN)),
    "without recipes": (QUICK_DTYPE, said(FAST, PLAIN, PLAIN, PLAIN)),
    "slow dtype": ({"bfloat16": 2.5, "int8": 0.2}, said(SLOW, "int8", "int8", "float32")),
    "slow but for one op": (SLOW_BUT_FOR_ONE_OP, said(SLOW, FASTEST, FASTEST, FASTEST)),
    "no difference": ({"bfloat16": 1.04}, said("bfloat16 is as fast as float32", *["float32"] * 3)),
    "float32 alone": ({}, "no fast dtype was measured without noise; --table shows the times"),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_the_first_line_says_what_to_do(profile_of, case):
    ways, expected = VERDICTS[case]
    assert verdict(profile_of(overhead=1e-12, **ways))[0] == expected


def test_a_gain_within_the_error_of_a_profile_does_not_change_the_choice(profile_of):
    assert "decoding: int8; " in verdict(profile_of(bfloat16=0.5, int8=0.2, int4=0.195))[0]


def test_figures_follow_the_fastest_first_with_the_ops_that_are_slower(profile_of):
    profile = profile_of(overhead=1e-12, bfloat16={"lstm": 2.0, "other": 0.5}, int8={"linear": 0.2})
    assert verdict(profile)[1:] == [
        "Linear layers of 1 row, times as fast as float32: int8 5, bfloat16 2, float32 1",
        "Of 128 rows or more: int8 5, bfloat16 2, float32 1",
        'Slower than float32 in bfloat16, unless recipe="fastest": lstm 0.5',
    ]


def test_noisy_times_are_left_out(profile_of):
    profile = profile_of(bfloat16=0.5, int8=0.1)
    noisy = tuple(dataclasses.replace(each, noisy=each.way == "int8") for each in profile.measurements)
    assert "int8" not in " ".join(verdict(dataclasses.replace(profile, measurements=noisy)))
