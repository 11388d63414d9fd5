"""Slips in policies: what is read as meant, and what the errors of others suggest."""

import re

import pytest
import torch
from torch import nn

import polycast
from polycast import Policy


@pytest.mark.parametrize("float32", ["float32", "torch.float32", "FP32", torch.float32], ids=str)
def test_float32_is_a_policy_of_ops(float32):
    assert Policy({"linear": float32}) == Policy({"linear": "fp32"})


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16], ids=str)
def test_the_error_for_another_dtype_names_the_policy_for_it(dtype):
    text = f"got {dtype!r}: for the fast dtype of the region write 'lower_precision_fp'"
    with pytest.raises(ValueError, match=re.escape(text)):
        Policy({"linear": dtype})


@pytest.mark.parametrize("name", ["torch.softmax", "F.softmax", "torch.nn.functional.softmax"])
def test_names_of_python_functions_are_names_of_ops(name):
    assert Policy({name: "fp32"}) == Policy({"softmax": "fp32"})
    x = torch.randn(2, 2).bfloat16()
    with polycast.autocast("cpu", policy={name: "fp32"}):
        assert x.softmax(-1).dtype is torch.float32


def test_a_function_that_is_no_op_is_refused_with_similar_names():
    with pytest.raises(ValueError, match="has no op 'Softmax'; the nearest are 'softmax'"):
        Policy({"torch.Softmax": "fp32"})


@pytest.mark.parametrize("name", ["fp32", "FP32", "float32", "banned"])
def test_the_name_of_a_cast_policy_is_not_a_policy(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=f"policy='{name}' is the name of a cast policy, not a policy file. A policy names ops"
    ):
        polycast.autocast("cpu", policy=name)
    Policy({"softmax": "fp32"}).save(name)
    with polycast.autocast("cpu", policy=name):
        assert torch.ones(2, dtype=torch.bfloat16).softmax(0).dtype is torch.float32


def test_a_missing_file_is_still_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        polycast.autocast("cpu", policy=str(tmp_path / "policy.toml"))


def test_a_mapping_of_modules_says_how_to_write_it():
    model = nn.Sequential(nn.Linear(2, 2))
    text = (
        "policy: '0' is a module, and a mapping names ops. For modules write "
        "polycast.apply_policy(model, polycast.Policy(modules={'0': 'fp32'}))"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        polycast.apply_policy(model, {"0": "fp32"})
    with pytest.raises(ValueError, match="'1' is not the name of an op"):
        polycast.apply_policy(model, {"1": "fp32"})
