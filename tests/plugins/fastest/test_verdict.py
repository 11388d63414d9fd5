"""The verdict that `polycast profile` draws from the times of a profile."""

import dataclasses

import pytest

from polycast_plugins.fastest.verdict import verdict

QUICK_DTYPE = {"bfloat16": 0.5, "float16": 3.0}


@pytest.mark.parametrize(
    ("ways", "expected"),
    [
        (
            {**QUICK_DTYPE, "int8": 0.2, "int4": 0.1},
            "bfloat16 is 2 times as fast as float32 here; decoding: int4; inference of many rows: int4; "
            "training: a plain region",
        ),
        (
            QUICK_DTYPE,
            "bfloat16 is 2 times as fast as float32 here; decoding: a plain region; "
            "inference of many rows: a plain region; training: a plain region",
        ),
        (
            {"bfloat16": 2.5, "int8": 0.2},
            "float32 is 2.5 times as fast as bfloat16 here; decoding: int8; inference of many rows: int8; "
            "training: float32",
        ),
        (
            {"bfloat16": {"conv2d": 0.5, "other": 2.5}, "bfloat16_kernel": 0.5},
            "float32 is 2.5 times as fast as bfloat16 here; decoding: the recipe fastest; "
            "inference of many rows: the recipe fastest; training: the recipe fastest",
        ),
        (
            {"bfloat16": 1.04},
            "bfloat16 is as fast as float32 here; decoding: float32; inference of many rows: float32; "
            "training: float32",
        ),
        ({}, "no fast dtype was measured without noise; --table shows the times"),
    ],
    ids=["int4", "without recipes", "slow dtype", "slow but for one op", "no difference", "float32 alone"],
)
def test_the_first_line_says_what_to_do(profile_of, ways, expected):
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
