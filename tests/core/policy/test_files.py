"""Policy files: reading, writing and invalid files."""

import contextlib
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import polycast
from polycast import Policy

POLICY = Policy(
    ops={
        "softmax": "fp32",
        "aten::mm": "passthrough",
        "op_of_another_torch": {"policy": "fp32", "optional": True},
        "sum.dim_IntList": "promote",
    },
    modules={
        "encoder.*.norm": "fp32",
        "lm_head": {"linear": "fp32", "output": "float32"},
        'quo"ted\n': "off",
        "decoder": "float16",
    },
    devices={"cuda": Policy({"bmm": "promote"}, {"lm_head": "off"}), "xpu": Policy()},
    name='BERT, "tuned"',
)
TEXT = """schema = 1
name = "BERT, \\"tuned\\""

[ops]
softmax = "fp32"
"aten::mm" = "passthrough"
op_of_another_torch = { policy = "fp32", optional = true }
"sum.dim_IntList" = "promote"

[modules]
"encoder.*.norm" = "fp32"
lm_head = { linear = "fp32", output = "float32" }
"quo\\"ted\\n" = "off"
decoder = "float16"

[devices.cuda.ops]
bmm = "promote"

[devices.cuda.modules]
lm_head = "off"

[devices.xpu]
"""
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda name: not name.startswith("class:"))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "policy.toml"


def test_text_of_a_policy_file(path):
    POLICY.save(path)
    assert path.read_text(encoding="utf-8") == TEXT
    assert b"\r" not in path.read_bytes()


def test_load_returns_the_saved_policy_and_saving_it_gives_the_same_text(path):
    path.write_text(TEXT, encoding="utf-8")
    loaded = Policy.load(str(path))
    assert loaded == POLICY
    loaded.save(path)
    assert path.read_text(encoding="utf-8") == TEXT


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(modules=st.dictionaries(NAMES, st.sampled_from(["fp32", "off", {"mm": "fp32"}])), name=st.text())
def test_any_names_survive_save_and_load(path, modules, name):
    modules = {re.sub(r"[*?\[\]{}]", r"[\g<0>]", key): rule for key, rule in modules.items()}
    policy = Policy(modules=modules, name=name.encode("utf-8", "ignore").decode())
    policy.save(path)
    loaded = Policy.load(path)
    assert (loaded, list(loaded.modules)) == (policy, list(modules))


def test_a_failed_save_keeps_the_old_file(path, monkeypatch):
    path.write_text(TEXT, encoding="utf-8")
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        Policy().save(path)
    assert path.read_text(encoding="utf-8") == TEXT
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_an_error_of_save_names_the_target(tmp_path):
    nowhere = tmp_path / "nowhere" / "policy.toml"
    for target, error in ((nowhere, FileNotFoundError), (tmp_path, IsADirectoryError)):
        with pytest.raises(error, match=re.escape(f"{str(target)!r}") + "$"):
            POLICY.save(target)


def test_load_a_file_written_by_hand(path):
    path.write_text(
        '# what must stay in float32\nschema = 1\n[ops]\n"aten::softmax" = "FP32"\n[modules.lm_head]\nlinear = "fp32"\n'
    )
    assert Policy.load(path) == Policy({"softmax": "fp32"}, {"lm_head": {"linear": "fp32"}})


INVALID = [
    (b"schema = 2\n[rules]\n", "it has schema 2, and this polycast reads schemas up to 1: install a newer polycast"),
    (b"[ops]\n", "a policy file begins with `schema = 1`, got None"),
    (b"", "a policy file begins with `schema = 1`, got None"),
    (b'schema = "1"\n', "a policy file begins with `schema = 1`, got '1'"),
    (b"schema = true\n", "a policy file begins with `schema = 1`, got True"),
    (b"schema = 0\n", "a policy file begins with `schema = 1`, got 0"),
    (b"schema = 1\n[op]\n", "op is not a key of a policy: did you mean 'ops'?"),
    (b"schema = 1\nqqq = 1\n", "qqq is not a key of a policy: expected one of name, ops, modules, devices."),
    (b"schema = 1\nops = 3\n", "ops must be a table, got 3"),
    (b"schema = 1\nname = 3\n", "name must be a str, got 3"),
    (b"schema = 1\n[devices]\ncuda = 3\n", "devices.cuda must be a table, got 3"),
    (b"schema = 1\n[devices.cuda.op]\n", "devices.cuda.op is not a key of a policy: did you"),
    (b"schema = 1\n[devices.cuda]\nops = 1\n", "devices.cuda.ops must be a table, got 1"),
    (b"schema = 1\n[devices.cuda.devices.cpu]\n", "devices.cuda.devices is not a key of a policy"),
    (b"schema = 1\n[devices.cdua]\n", "devices['cdua']: not a device type that torch's autocast knows: did you"),
    (b"schema = 1\nname = '\xff'\n", "it is not UTF-8: byte 19 is 0xff"),
    (b'schema = 1\n[ops]\nsoftmax = "fp3', "it is not TOML: "),
    (b"schema = 1\n[ops]\nmm = 'fp32'\nmm = 'fp32'\n", "it is not TOML: "),
    (b"schema = 1\nname = " + b"[" * 100_000, "its values are nested too deeply to be a policy"),
    (b"schema = 1\nname = " + b"{a = " * 100_000, "its values are nested too deeply to be a policy"),
    (
        b"schema = 1\n[ops]\nsofmax = 'fp32'\n",
        f"this torch ({torch.__version__}) has no op 'sofmax'; the nearest are 'softmax', '_softmax', 'fmax'",
    ),
    (b"schema = 1\n[ops]\nop_of_2_99 = { policy = 'fp32', optional = false }\n", f"this torch ({torch.__version__})"),
    (
        b"schema = 1\n[devices.cuda.ops]\nmm = 'fp23'\n",
        "devices.cuda: the policy of 'mm' must be a CastPolicy or the name of one, got 'fp23'; the nearest is",
    ),
    (b"schema = 1\n[ops]\nmm = { optional = true }\n", "the policy of 'mm' must be a CastPolicy or the name of one, "),
]


def test_an_invalid_file_is_refused(path, subtests):
    for content, problem in INVALID:
        with subtests.test(problem=problem):
            path.write_bytes(content)
            with pytest.raises(ValueError, match=f"^{re.escape(f'policy file {str(path)!r}: {problem}')}"):
                Policy.load(path)


def test_a_truncated_file_is_refused_unless_it_ends_with_a_complete_line(path, subtests):
    for length in range(1, len(TEXT), 7):
        with subtests.test(length=length):
            path.write_text(TEXT[:length], encoding="utf-8")
            refusal = pytest.raises(ValueError, match=f"^{re.escape(f'policy file {str(path)!r}: ')}")
            is_whole = TEXT[length] == "\n" or TEXT[length - 1] == "\n"
            with contextlib.nullcontext() if is_whole else refusal:
                Policy.load(path)


def test_a_missing_file_is_an_os_error(path):
    for use in (Policy.load, lambda path: polycast.autocast("cpu", policy=str(path))):
        with pytest.raises(FileNotFoundError):
            use(path)
