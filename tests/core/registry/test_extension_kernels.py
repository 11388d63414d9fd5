"""Kernels for recipes that extensions add to a device."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NF4 = """
class Nf4(polycast.plugin.Recipe):
    kind = "nf4"
    ops = ("linear",)
    min_size = 0
"""

LIBRARY = """
@torch.library.custom_op("acme::attend", mutates_args=())
def attend(x: torch.Tensor) -> torch.Tensor:
    return x.clone()
"""

LINEAR = """
layer, x = torch.nn.Linear(16, 16), torch.ones(2, 16)
def computed(recipe):
    with torch.no_grad(), polycast.autocast("cpu", recipe=recipe):
        return layer(x)[0, 0].item(), polycast.explain("linear", x, layer.weight, layer.bias, device_type="cpu").package
"""


def test_a_recipe_and_kernels_of_an_extension_compute_ops_on_the_cpu(run, extension, engine):
    extension("acme-nf4", amendment=NF4, kind="nf4", mark=4.0)
    answer = run(
        LINEAR + 'polycast.plugin.get_backend("cpu")\nanswer = [*computed("nf4"), *computed("nf4")]',
        POLYCAST_ENGINE=engine,
    )
    assert answer == [4.0, "acme-nf4"] * 2


def test_observe_and_explain_say_which_package_computed(run, extension):
    extension("acme-nf4", amendment=NF4, kind="nf4", mark=4.0)
    answer = run(
        LINEAR
        + """
polycast.plugin.get_backend("cpu")
with polycast.observe() as seen:
    computed("nf4")
with torch.no_grad(), polycast.autocast("cpu", recipe="nf4"):
    text = str(polycast.explain("linear", x, layer.weight, layer.bias, device_type="cpu"))
answer = [[each.package for each in seen.low_bit], str(seen), text]
""",
        POLYCAST_ENGINE="native",
    )
    assert answer[0] == ["acme-nf4"]
    assert "nf4 on cpu: linear computed once by acme-nf4" in answer[1]
    assert "the recipe nf4 computes it by acme-nf4" in answer[2]


def test_kernels_are_asked_in_order_and_the_first_that_supports_a_call_computes(run, extension, engine):
    extension("acme-one", amendment=NF4, kind="nf4", mark=1.0, refusal="one refuses")
    extension("acme-two", kind="nf4", mark=2.0)
    extension("acme-three", kind="nf4", mark=3.0)
    answer = run(
        LINEAR + 'polycast.plugin.get_backend("cpu")\nanswer = [*computed("nf4"), *computed("nf4")]',
        POLYCAST_ENGINE=engine,
    )
    assert answer == [3.0, "acme-three"] * 2


def test_the_reasons_of_all_kernels_are_given_if_none_supports_a_call(run, extension):
    extension("acme-one", amendment=NF4, kind="nf4", refusal="one refuses")
    extension("acme-two", kind="nf4", refusal="two refuses")
    answer = run(
        LINEAR
        + """
polycast.install("cpu")
with polycast.autocast("cpu", recipe="nf4"), torch.no_grad():
    answer = polycast.explain("linear", x, layer.weight, layer.bias, device_type="cpu").declined
"""
    )
    assert answer == "one refuses; two refuses"


def test_a_recipe_that_no_package_has_kernels_for_is_not_supported(run):
    assert run("""
        backend = polycast.plugin.get_backend("xpu")
        answer = polycast.plugin.check(backend, polycast.Int8())
    """) == {"available": False, "reason": "there are no kernels for int8 on xpu"}


def test_the_reasons_of_several_packages_are_given_if_a_recipe_is_not_supported(run, extension):
    amendment = (
        "AcmeExtension.recipe_availability = lambda self, recipe: polycast.plugin.Availability(False, 'no {} here')"
    )
    extension("acme-one", "xpu", amendment=amendment.format("one"))
    extension("acme-two", "xpu", amendment=amendment.format("two"))
    answer = run("""
        backend = polycast.plugin.get_backend("xpu")
        answer = polycast.plugin.check(backend, polycast.Int8()).reason
    """)
    assert answer == "acme-one: no one here; acme-two: no two here"


def test_a_backend_registered_by_hand_is_extended_too(run, extension):
    extension("acme-nf4", amendment=NF4, kind="nf4", mark=4.0)
    answer = run(
        "from polycast_backends.cpu import CpuBackend\npolycast.plugin.register_backend(CpuBackend())\n"
        + LINEAR
        + 'polycast.install("cpu")\nanswer = computed("nf4")'
    )
    assert answer == [4.0, "acme-nf4"]


def test_a_saved_cache_names_the_extension_that_prepacked_its_weights(run, extension, tmp_path):
    extension("acme-nf4", amendment=NF4, kind="nf4", mark=4.0)
    answer = run(
        LINEAR
        + f"""
polycast.install("cpu")
cache = polycast.WeightCache()
with torch.no_grad(), polycast.autocast("cpu", recipe="nf4", cache=cache):
    layer(x)
path = {str(tmp_path / "saved.safetensors")!r}
cache.save(path, layer)
polycast.WeightCache.load(path, layer)
from polycast.engine.persistence.manifest import Manifest
from polycast.policy.tensor_file import TensorFile
from pathlib import Path
made = Manifest.of_metadata(TensorFile(Path(path)).metadata).entries[0].made
answer = made.backend
"""
    )
    assert answer == "acme_nf4.AcmeExtension acme-nf4 1.0"


def test_the_package_of_the_guide_works(run, distribution):
    page = (Path(__file__).parents[3] / "docs/extensions.md").read_text(encoding="utf-8")
    module, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (program,) = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    distribution("acme-ternary", {"cpu": "acme_ternary"}, {"acme_ternary.py": module}, group="polycast.extensions")
    answer = run(
        "polycast.plugin.get_backend('cpu')\nprinted = []\n"
        f"exec({program!r}, {{'print': lambda value: printed.append(str(value))}})\nanswer = printed"
    )
    assert answer == re.findall(r"# (.*)", program)


@pytest.mark.slow
def test_wheels_with_a_recipe_kernels_for_another_and_ops_work_beside_polycasts_int8(extension, folder, tmp_path):
    pytest.importorskip("pip", reason="pip is not installed here")
    extension("acme-nf4", amendment=NF4, kind="nf4", mark=4.0)
    extension("acme-int8", kind="int8", mark=8.0, refusal="acme refuses")
    policies = "AcmeExtension.policies = {'acme::attend': polycast.CastPolicy.FP32}\n"
    extension("acme-ops", amendment=LIBRARY + policies)
    site = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    offline = ["--no-index", "--no-deps"]
    for name in ("acme_nf4", "acme_int8", "acme_ops"):
        project = tmp_path / name
        project.mkdir()
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
        build = [*pip, "wheel", "--no-build-isolation", *offline, "--wheel-dir", tmp_path, project]
        subprocess.run(build, check=True, capture_output=True)
    subprocess.run(
        [*pip, "install", *offline, "--target", site, *tmp_path.glob("*.whl")], check=True, capture_output=True
    )
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
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        capture_output=True,
        text=True,
    )
    assert json.loads(done.stdout) == [
        ["acme_int8", "acme_nf4", "acme_ops"],
        "torch.float32",
        "torch.float32",
        [["int8", "polycast"], ["nf4", "acme_nf4"]],
        True,
    ]
