"""``Calibration``: a value, its files, and the weights that it recognizes."""

import copy
import dataclasses
import io
import json
import pickle
import re

import pytest
import torch
from safetensors.torch import load_file, save
from tests.plugins.models import Defined
from torch import nn

import polycast
from polycast import Calibration, Int8

AVAILABLE = polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Int8())
pytestmark = pytest.mark.skipif(not AVAILABLE, reason=f"no int8 here: {AVAILABLE.reason}")

RECIPE = Int8(min_size=0)


def multiplied(self, x):
    return torch.addmm(torch.zeros(8), x, self.weight)


def head():
    """Return a model with a weight [K, N], as GPT-2 has them."""
    return Defined(multiplied, weight=nn.Parameter(torch.randn(24, 8)))


def new_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 24), head())


@pytest.fixture(scope="module")
def model():
    return new_model()


@pytest.fixture(scope="module")
def e(model):
    x = torch.randn(16, 32)
    x[:, 3] *= 300
    return polycast.calibrate(model, [x], RECIPE)


def factors(e, model):
    return [e.factors(model[0].weight), e.factors(model[1].weight.t())]


def same(one, other):
    return all(torch.equal(*pair) if pair[0] is not None else pair[1] is None for pair in zip(one, other, strict=True))


def test_a_file_of_safetensors_holds_the_calibration_by_name_of_the_weight(model, e, tmp_path):
    for _ in range(2):  # the second time over the other one
        e.save(tmp_path / "e.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["e.safetensors"]
    loaded = Calibration.load(tmp_path / "e.safetensors", model)
    assert loaded == e
    assert hash(loaded) == hash(e)
    assert same(factors(loaded, model), factors(e, model))
    assert str(loaded) == str(e)
    found = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "e.safetensors").items()}
    assert found == {each.name: (each.shape[1],) for each in e.weights if each.factors is not None}
    assert "0.weight" in found


def test_a_later_checkpoint_of_the_model_loads_it(e, tmp_path):
    e.save(tmp_path / "e.safetensors")
    later = new_model(1)
    assert e.factors(later[0].weight) is None
    loaded = Calibration.load(tmp_path / "e.safetensors", later)
    assert loaded != e
    assert torch.equal(loaded.factors(later[0].weight), e.weights[0].factors)


SIZES = "another model: '0.weight' has the size (24, 32) in the file and (25, 32) in the model"


@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(32, 24)), ValueError, "another model: the model has no parameter '1.weight'"),
        (lambda: nn.Linear(32, 24), ValueError, "no parameter '0.weight'; the model has no parameter '1.weight'"),
        (lambda: nn.Sequential(nn.Linear(32, 25), head()), ValueError, SIZES),
        (lambda: new_model().to("meta"), ValueError, "'0.weight' is on meta, without values: load them first"),
        (dict, TypeError, "model must be a torch.nn.Module or None, got dict"),
    ],
    ids=["fewer", "names", "sizes", "meta", "dict"],
)
def test_another_model_is_refused_with_what_differs(e, tmp_path, other, error, message):
    e.save(tmp_path / "e.safetensors")
    with pytest.raises(error, match=re.escape(message)):
        Calibration.load(tmp_path / "e.safetensors", other())


def test_many_differences_are_counted(tmp_path):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(9)))
    polycast.calibrate(model, [torch.randn(4, 8)], RECIPE).save(tmp_path / "e")
    with pytest.raises(ValueError, match=r"'2\.weight'; and 6 more$"):
        Calibration.load(tmp_path / "e", nn.Linear(8, 8))


def described(change):
    """Return a function that changes the description in the content of a file."""

    def changed(content):
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        change(header["__metadata__"])
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + content[8 + size :]

    return changed


def flipped(where):
    return lambda content: content[:where] + bytes([content[where] ^ 1]) + content[where:][1:]


def truncated(part):
    return lambda content: content[: int(len(content) * part)]


OTHER_FACTORS = "is damaged: its contents do not have the digest that it says"
BAD = [
    *((truncated(part), "is no calibration: it is not a complete safetensors file") for part in (0, 0.005, 0.5, 0.999)),
    *((lambda _, other=other: other, "is no ") for other in (b"", b"{}", b"\0" * 100, b"\xff" * 100)),
    (
        lambda _: save({"0.weight": torch.ones(32)}),
        "is a safetensors file, but not a calibration that polycast saved",
    ),
    *((flipped(where), OTHER_FACTORS) for where in (-1, -20, -100)),
    (described(lambda metadata: metadata.update(version="1")), "is of version 1, and this polycast reads version 2"),
    (described(lambda metadata: metadata.pop("recipe")), "is damaged: 'recipe'"),
    (described(lambda metadata: metadata.pop("weights")), "is damaged: 'weights'"),
    (described(lambda metadata: metadata.update(weights="[]]")), "is damaged: "),
    (described(lambda metadata: metadata.update(weights="{}")), "is damaged: its contents"),
    (described(lambda metadata: metadata.update(weights='{"0.weight": {}}')), "is damaged: 'strength'"),
    (described(lambda metadata: metadata.update(weights='{"0.weight": 3}')), "is damaged: 'int' object"),
    (described(lambda metadata: metadata.update(digest="0")), "is damaged: its contents"),
]


def test_a_file_with_other_contents_is_refused(model, e, tmp_path, subtests):
    path = tmp_path / "e"
    for number, (change, problem) in enumerate(BAD):
        with subtests.test(number=number, problem=problem):
            e.save(path)
            path.write_bytes(change(path.read_bytes()))
            with pytest.raises(ValueError, match=re.escape(problem)):
                Calibration.load(path, model)


def reloaded(model):
    other = new_model(1)
    other.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return other


def pickled(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        reloaded,
        pickled,
        lambda model: copy.deepcopy(model).bfloat16(),
        lambda model: copy.deepcopy(model).bfloat16().float(),
        lambda model: copy.deepcopy(model).requires_grad_(False),
        lambda model: copy.deepcopy(model).share_memory(),
    ],
    ids=["deepcopy", "assigned", "pickled", "bfloat16", "bfloat16 and back", "frozen", "moved"],
)
def test_weights_of_equal_values_are_recognized(model, e, copied):
    assert same(factors(e, copied(model)), factors(e, model))


def test_changed_weights_are_not_recognized(model, e):
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.mul_(1.1)
    assert e.factors(other[0].weight) is None
    assert e.describe(other[0].weight) == "not calibrated: the calibration does not have the values of this weight"
    assert e.describe(model[0].weight).startswith("equalized with strength 0.")


def test_it_survives_pickling_and_copying(model, e):
    other = pickle.loads(pickle.dumps(e))
    assert other == e
    assert same(factors(other, model), factors(e, model))
    assert copy.deepcopy(e) is copy.copy(e) is e


def test_it_cannot_be_changed(model, e):
    with pytest.raises(dataclasses.FrozenInstanceError):
        e.weights = ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        e.weights[0].strength = 1.0
    before = e.factors(model[0].weight)
    e.factors(model[0].weight).zero_()
    assert torch.equal(e.factors(model[0].weight), before)


def test_its_texts(e):
    with_factors = sum(each.factors is not None for each in e.weights)
    assert repr(e) == f"<Calibration {e.digest}: factors for {with_factors} and levels for 0 of 2 weights>"
    assert len(e.digest) == 16
    head, _, first, *_ = str(e).splitlines()
    assert head.split() == ["weight", "size", "strength", "levels", "error", "without"]
    assert first.split()[:4] == ["0.weight", "24", "x", "32"]
    assert str(e).endswith("Errors of products relative to float32's, on the data.")
