"""Extensions of other packages beside the plugins: what observes and explains them, and polycast's own int8."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.core.registry.test_vendor_kernels import VENDOR, amended
from tests.plugins.quantize.test_extension_kernels import LINEAR, NF4

LIBRARY = """
@torch.library.custom_op("acme::attend", mutates_args=())
def attend(x: torch.Tensor) -> torch.Tensor:
    return x.clone()
"""


def test_observe_says_which_package_computed(run, extension):
    extension("acme-nf4", amendment=NF4, kind="nf4", mark=4.0)
    answer = run(
        LINEAR
        + """
with polycast.observe() as seen:
    computed()
answer = [[each.package for each in seen.low_bit], str(seen)]
""",
        POLYCAST_ENGINE="native",
    )
    assert answer[0] == ["acme-nf4"]
    assert "nf4 on cpu: linear computed once by acme-nf4" in answer[1]


def test_the_package_of_the_guide_works(run, distribution):
    page = (Path(__file__).parents[2] / "docs/extensions.md").read_text(encoding="utf-8")
    module, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    program, *_ = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    distribution("acme-ternary", {"cpu": "acme_ternary"}, {"acme_ternary.py": module}, group="polycast.extensions")
    answer = run(
        "polycast.plugin.get_backend('cpu')\nprinted = []\n"
        f"exec({program!r}, {{'print': lambda value: printed.append(str(value))}})\nanswer = printed"
    )
    assert answer == re.findall(r"# (.*)", program)


def test_the_suite_names_ops_that_only_the_vendor_handles(run, plugin):
    plugin("acme-hpu", "hpu", amended("{'aten::mm': polycast.CastPolicy.FP32}"))
    answer = run(f"""{VENDOR}
from polycast_plugins.testing import BackendConformance
class TestHpu(BackendConformance):
    backend = "hpu"
answer = error_of(TestHpu().test_no_op_of_torchs_table_is_missing)
""")
    assert answer[0] == "AssertionError"
    assert "and runs them: aten::exp. Give each a policy" in answer[1]


@pytest.mark.slow
def test_wheels_with_a_recipe_kernels_for_another_and_ops_work_beside_polycasts_int8(
    extension, folder, tmp_path, launch
):
    pytest.importorskip("pip", reason="pip is not installed here")
    extension("acme-nf4", amendment=NF4, kind="nf4", mark=4.0)
    extension("acme-int8", kind="int8", mark=8.0, refusal="acme refuses")
    policies = "AcmeExtension.policies = {'acme::attend': polycast.CastPolicy.FP32}\n"
    extension("acme-ops", amendment=LIBRARY + policies)
    site, projects = tmp_path / "installed", []
    for name in ("acme_nf4", "acme_int8", "acme_ops"):
        project = tmp_path / name
        project.mkdir()
        projects.append(project)
        (folder / f"{name}.py").rename(project / f"{name}.py")
        (project / "pyproject.toml").write_text(f"""
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "{name}"
version = "3.1"
[project.entry-points."polycast.extensions"]
cpu = "{name}"
[tool.setuptools]
py-modules = ["{name}"]
""")
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-build-isolation"]
    offline = ["--no-index", "--no-deps", "--target", site]
    subprocess.run([*pip, *offline, *projects], check=True, capture_output=True)
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    script = """
import json, torch, polycast
polycast.plugin.get_backend("cpu")
layer, x = torch.nn.Linear(256, 256), torch.ones(2, 256)
answer = [[each.partition(" ")[0] for each in polycast.backends()["cpu"].extensions][:3]]
with torch.no_grad(), polycast.observe() as seen:
    for recipe in ("nf4", "int8"):
        with polycast.autocast("cpu", recipe=recipe):
            layer(x)
            answer.append(torch.ops.acme.attend(x.bfloat16()).dtype)
answer.append(sorted({(each.recipe, each.package) for each in seen.low_bit}))
answer.append(bool(polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Int8())))
print(json.dumps(answer, default=str))
"""
    done = launch(
        "import warnings; warnings.simplefilter('ignore')" + script, environment={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        ["acme_int8", "acme_nf4", "acme_ops"],
        "torch.float32",
        "torch.float32",
        [["int8", "polycast"], ["nf4", "acme_nf4"]],
        True,
    ]
