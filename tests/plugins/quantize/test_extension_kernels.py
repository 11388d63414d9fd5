"""Kernels for recipes that extensions add to a device."""

NF4 = """
import polycast_plugins.quantize
class Nf4(polycast_plugins.quantize.LowBitRecipe):
    kind = "nf4"
    ops = ("linear",)
    min_size = 0
"""


LINEAR = """
layer, x = torch.nn.Linear(16, 16), torch.ones(2, 16)
def computed():
    with torch.no_grad(), polycast.autocast("cpu", recipe="nf4"):
        return layer(x)[0, 0].item(), explained().package

def explained():
    with torch.no_grad(), polycast.autocast("cpu", recipe="nf4"):
        return polycast.plugin.explain_op("linear", "cpu", (x, layer.weight, layer.bias))

polycast.plugin.get_backend("cpu")
"""


def test_a_recipe_and_kernels_of_an_extension_compute_ops_on_the_cpu(run, extension, engine):
    extension("acme-nf4", amendment=NF4, kind="nf4", mark=4.0)
    *answer, explained = run(f"{LINEAR}answer = [*computed(), *computed(), str(explained())]", POLYCAST_ENGINE=engine)
    assert answer == [4.0, "acme-nf4"] * 2
    assert "the recipe nf4 computes it by acme-nf4" in explained


def test_kernels_are_asked_in_order_and_the_first_that_supports_a_call_computes(run, extension, engine):
    extension("acme-one", amendment=NF4, kind="nf4", mark=1.0, refusal="one refuses")
    extension("acme-two", kind="nf4", mark=2.0)
    extension("acme-three", kind="nf4", mark=3.0)
    answer = run(f"{LINEAR}answer = [*computed(), *computed()]", POLYCAST_ENGINE=engine)
    assert answer == [3.0, "acme-three"] * 2


def test_the_reasons_of_all_kernels_are_given_if_none_supports_a_call(run, extension):
    extension("acme-one", amendment=NF4, kind="nf4", refusal="one refuses")
    extension("acme-two", kind="nf4", refusal="two refuses")
    assert run(f"{LINEAR}answer = explained().declined") == "one refuses; two refuses"


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
        + "answer = computed()"
    )
    assert answer == [4.0, "acme-nf4"]


def test_a_saved_cache_names_the_extension_that_prepacked_its_weights(run, extension, tmp_path):
    extension("acme-nf4", amendment=NF4, kind="nf4", mark=4.0)
    answer = run(
        LINEAR
        + f"""
cache = polycast.WeightCache()
with torch.no_grad(), polycast.autocast("cpu", recipe="nf4", cache=cache):
    layer(x)
path = {str(tmp_path / "saved.safetensors")!r}
cache.save(path, layer)
polycast.WeightCache.load(path, layer)
from polycast_plugins.quantize.contents import SavedContents
from polycast_plugins.quantize.tensor_file import TensorFile
from pathlib import Path
made = SavedContents.of_metadata(TensorFile(Path(path)).metadata).entries[0].made
answer = made.backend
""",
        POLYCAST_ENGINE="native",  # the other caches nothing
    )
    assert answer == "acme_nf4.AcmeExtension acme-nf4 1.0"
