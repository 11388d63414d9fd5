"""Programs that torch.autocast refuses for their dtypes: in a region they compute as torch does after casts by hand."""

import pytest
import torch
from torch.nn import functional as F
from torch.torch_version import TorchVersion

import polycast

pytestmark = pytest.mark.filterwarnings("ignore:.*(is in beta|in beta state)")

DTYPES = {"f": torch.float32, "b": torch.bfloat16, "h": torch.float16}
MASK = torch.tensor([True, False, True, True])
ROWS = torch.tensor([2, 0, 2])
GRID = torch.tensor([[0, 2], [1, 1], [3, 0]])
ROWS_AND_COLUMNS = GRID[:, :1].expand(3, 8)


def made(tensor, write):
    """Return a copy of a tensor that `write` has written to."""
    copy = tensor.clone()
    write(copy)
    return copy


def writing(write):
    """Return a program that writes to a copy of its first input."""
    return lambda c, x, *others: made(x, lambda copy: write(c, copy, *others))


def batch_norm(x, weight, bias, mean, var, training=True):
    mean, var = mean.clone(), var.clone()
    return F.batch_norm(x, mean, var, weight, bias, training), mean, var


def embedding_bag(c, weight, scales):
    return F.embedding_bag(ROWS[None], c(weight, "f"), per_sample_weights=scales[None], mode="sum")


def experts(c, x, *weights):
    out = torch.zeros(4, 8, dtype=torch.bfloat16)
    for rows, weight in zip((ROWS, ROWS - 2, ROWS + 1), weights, strict=True):
        out.index_add_(0, rows % 4, c(F.linear(x[rows % 4], weight).float(), "b"))
    return out


def graph_network(c, x, weight):
    messages = F.linear(x, weight)  # bfloat16
    return torch.zeros(4, 8).scatter_reduce(0, ROWS_AND_COLUMNS, c(messages[:3], "f"), "mean").relu()


def encoder(c, x, weight, gain, bias):
    hidden = x + F.linear(x, weight)
    hidden = F.layer_norm(c(hidden.bfloat16(), "f"), (8,), c(gain, "f"), c(bias, "f"))
    return made(hidden, lambda h: h.masked_scatter_(MASK[:, None], c(F.linear(x, weight), "f")))


def moving_average(c, *pairs):
    averages = [pair.detach().clone() for pair in pairs[::2]]
    for average, new in zip(averages, pairs[1::2], strict=True):
        average.lerp_(c(new, "f"), 0.25)
    return averages


def foreach_average(c, a, b, x, y):
    averages = [a.clone(), b.clone()]
    torch._foreach_lerp_(averages, [c(x, "f"), c(y, "b")], 0.25)
    return averages


# By name: the inputs, by dtype and shape ("!": without a gradient), and what writes to a copy of the first of them.
# c(tensor, dtype) casts by hand.
WRITES = {
    "masked assignment": ("b4x8 f3x8", lambda c, t, y: t.__setitem__(MASK, c(y, "b"))),
    "row assignment": ("b4x8 f3x8", lambda c, t, y: t.__setitem__(ROWS % 3, c(y, "b"))),
    "assignment to pairs": ("f4x8 b3", lambda c, t, y: t.__setitem__((GRID[:, 0], GRID[:, 1]), c(y, "f"))),
    "a KV cache": ("b2x4x8! f2x1x8", lambda c, t, y: t.__setitem__((slice(None), ROWS[:1]), c(y, "b"))),
    "a KV cache in float16": ("h4x8! b3x8", lambda c, t, y: t.index_copy_(0, ROWS % 3, c(y, "h"))),
    "a KV cache by index_put_": ("b4x8! f3x8", lambda c, t, y: t.index_put_((ROWS % 3,), c(y, "b"))),
    "gradient accumulation by rows": ("b4x8 f3x8", lambda c, t, y: t.index_put_((ROWS,), c(y, "b"), True)),
    "index_add_ with alpha": ("f4x8 b3x8", lambda c, t, y: t.index_add_(0, ROWS, c(y, "f"), alpha=2)),
    "index_reduce_": ("f4x8 b3x8", lambda c, t, y: t.index_reduce_(0, ROWS, c(y, "f"), "amax")),
    "index_copy_": ("b4x8 f3x8", lambda c, t, y: t.index_copy_(0, ROWS % 3, c(y, "b"))),
    "image tokens": ("b4x8 f3x8", lambda c, t, y: t.masked_scatter_(MASK[:, None], c(y, "b"))),
    "put_": ("b4x8 f3", lambda c, t, y: t.put_(ROWS % 3, c(y, "b"))),
    "scatter_": ("b4x8 f3x2", lambda c, t, y: t.scatter_(1, GRID, c(y, "b"))),
    "scatter_add_ of messages": ("b4x8 f3x8", lambda c, t, y: t.scatter_add_(0, ROWS_AND_COLUMNS, c(y, "b"))),
    "scatter_reduce_ of maxima": (
        "f4x8 b3x8",
        lambda c, t, y: t.scatter_reduce_(0, ROWS_AND_COLUMNS, c(y, "f"), "amax"),
    ),
    "addmm_": ("f4x3 b4x8 b8x3", lambda c, t, y, z: t.addmm_(c(y, "f"), c(z, "f"))),
    "baddbmm_": ("b2x4x3 f2x4x8 b2x8x3", lambda c, t, y, z: t.baddbmm_(c(y, "b"), z)),
}
# The same, with the program.
PROGRAMS = {
    "index_put": ("b4x8 f3x8", lambda c, x, y: c(x, "f").index_put((ROWS % 3,), y)),
    "a router of experts": ("f4x8 f8x8 f8x8 f8x8", experts),
    "index_add": ("b4x8 f3x8", lambda c, x, y: torch.index_add(c(x, "f"), 0, ROWS, y)),
    "image tokens out of place": ("f4x8 b3x8", lambda c, x, y: x.masked_scatter(MASK[:, None], c(y, "f"))),
    "scatter": ("b4x8 f3x2", lambda c, x, y: torch.scatter(c(x, "f"), 1, GRID, y)),
    "scatter_add of messages": ("f4x8 b3x8", lambda c, x, y: x.scatter_add(0, ROWS_AND_COLUMNS, c(y, "f"))),
    "scatter_reduce in a graph network": ("f4x8 f8x8", graph_network),
    "an average of weights": ("f4x8! b4x8! f8! h8!", moving_average),
    "foreach lerp": ("f4x8! b8! b4x8! f8!", foreach_average),
    "interpolation": ("b4x8 f4x8", lambda c, x, y: torch.lerp(c(x, "f"), y, 0.3)),
    "interpolation by weights": ("b4x8 b4x8 f4x8", lambda c, x, y, w: torch.lerp(c(x, "f"), c(y, "f"), w)),
    "layer norm of float32": ("f4x8 b8 b8", lambda c, x, w, b: F.layer_norm(x, (8,), c(w, "f"), c(b, "f"))),
    "layer norm in float16": ("b4x8 h8 h8", lambda c, x, w, b: F.layer_norm(c(x, "f"), (8,), c(w, "f"), c(b, "f"))),
    "group norm": ("f2x8x3 b8 b8", lambda c, x, w, b: F.group_norm(x, 2, c(w, "f"), c(b, "f"))),
    "instance norm": ("f2x8x3 b8 b8", lambda c, x, w, b: F.instance_norm(x, weight=c(w, "f"), bias=c(b, "f"))),
    "batch norm with bfloat16 statistics": (
        "f4x8 f8 f8 b8! b8!",
        lambda c, x, w, b, m, v: batch_norm(x, w, b, c(m, "f"), c(v.abs(), "f"))[0],
    ),
    "batch norm with bfloat16 weights": (
        "f4x8 b8 b8 f8! f8!",
        lambda c, x, w, b, m, v: batch_norm(x, c(w, "f"), c(b, "f"), m, v),
    ),
    "batch norm in evaluation": (
        "f4x8 b8 b8 b8! b8!",
        lambda c, x, w, b, m, v: batch_norm(x, *(c(t, "f") for t in (w, b, m, v.abs())), False)[0],
    ),
    "weight norm": ("b4x8 f4x1", lambda c, v, g: torch._weight_norm(c(v, "f"), g)),
    "an encoder with bfloat16 norms": ("f4x8 f8x8 h8 h8", encoder),
    "embedding bag": ("b4x8 f3", embedding_bag),
    "embedding bag without gradients": ("b4x8! f3!", embedding_bag),
    "dot": ("f8 b8", lambda c, x, y: torch.dot(x, c(y, "f"))),
    "mv": ("f4x8 b8", lambda c, x, y: torch.mv(x, c(y, "f"))),
    "addmv": ("f4 b4x8 b8", lambda c, x, y, z: torch.addmv(x, c(y, "f"), c(z, "f"))),
    "an outer product": ("f4x8 b4 b8", lambda c, x, y, z: torch.addr(x, c(y, "f"), c(z, "f"))),
    "tensordot": ("f4x8 b8x3", lambda c, x, y: torch.tensordot(x, c(y, "f"), 1)),
    "inner": ("f4x8 b3x8", lambda c, x, y: torch.inner(x, c(y, "f"))),
    "bilinear": ("f4x8 b4x3 f2x8x3 f2", lambda c, x, y, w, b: F.bilinear(x, c(y, "f"), w, b)),
    "multi_dot": ("f4x8 b8x3 f3x2", lambda c, x, y, z: torch.linalg.multi_dot([x, c(y, "f"), z])),
    "cross": ("f4x3 b4x3", lambda c, x, y: torch.cross(x, c(y, "f"), dim=1)),
    "complex": ("f4 b4", lambda c, x, y: torch.view_as_real(torch.complex(x, c(y, "f")))),
    "a grid": ("f4 b3", lambda c, x, y: torch.meshgrid(x, c(y, "f"), indexing="ij")),
    "cartesian_prod": ("f4 b3", lambda c, x, y: torch.cartesian_prod(x, c(y, "f"))),
    "isclose": ("f4! b4!", lambda c, x, y: torch.isclose(x, c(y, "f"))),
    "a system of equations": ("b3x3 f3", lambda c, x, y: torch.linalg.solve_ex(c(x, "f"), y)[0]),
    "a determinant": ("b3x3", lambda c, x: torch.linalg.slogdet(c(x, "f"))[1]),
    "distances": ("b4x8", lambda c, x: F.pdist(c(x, "f"))),
    "interpolation of images": (
        "b1x2x8x8",
        lambda c, x: F.interpolate(c(x, "f"), (5, 5), mode="bilinear", antialias=True),
    ),
    **{name: (text, writing(write)) for name, (text, write) in WRITES.items()},
}


def cast(tensor, dtype):
    return tensor.to(DTYPES[dtype])


def uncast(tensor, dtype):
    return tensor


def inputs_of(text):
    """Return the tensors of a text such as ``"b4x8 f8!"``."""
    torch.manual_seed(0)
    tensors = []
    for each in text.split():
        tensor = torch.randn([int(size) for size in each[1:].rstrip("!").split("x")]).to(DTYPES[each[0]])
        tensors.append(tensor.requires_grad_(not each.endswith("!")))
    return tensors


def outcome(region, program, text, c):
    """Return the results of a program in a region, and the gradients of its inputs."""
    inputs = inputs_of(text)
    with region:
        found = program(c, *inputs)
    results = list(found) if isinstance(found, (list, tuple)) else [found]
    differentiable = [each for each in results if each.requires_grad]
    wanted = [each for each in inputs if each.requires_grad]
    if not differentiable:
        return results
    cotangents = [torch.ones_like(each) / 3 for each in differentiable]
    gradients = torch.autograd.grad(differentiable, wanted, cotangents, allow_unused=True)
    return [each.detach() for each in results] + list(gradients)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_computes_as_after_casts_by_hand(name, engine):
    text, program = PROGRAMS[name]
    if name == "addmv" and TorchVersion(torch.__version__) < "2.13":
        pytest.skip("this torch takes any dtype for what is added")
    with pytest.raises((RuntimeError, NotImplementedError)):
        outcome(torch.autocast("cpu"), program, text, uncast)
    expected = outcome(torch.autocast("cpu"), program, text, cast)
    found = outcome(polycast.autocast("cpu"), program, text, uncast)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)  # the dtypes too


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "program",
    [
        lambda x, w: torch.eye(8).to_sparse_csr() @ x,
        lambda x, w: torch.mm(torch.eye(8).to_sparse_csr(), x),
        lambda x, w: torch.addmm(x, torch.eye(8).to_sparse_csr(), w),
        lambda x, w: torch.sparse.mm(torch.eye(8).to_sparse_csr(), x),
        lambda x, w: F.linear(x.t(), torch.eye(8).to_sparse_csr()),
    ],
    ids=["matmul", "mm", "addmm", "sparse.mm", "linear"],
)
def test_products_of_compressed_sparse_tensors_are_float32(program, dtype, engine):
    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    with pytest.raises((RuntimeError, NotImplementedError), match="mkl"), torch.autocast("cpu", dtype):
        program(x, w)
    with polycast.autocast("cpu", dtype):
        found = program(x, w)
    expected = program(x, w)
    assert torch.equal(found, expected)
    assert found.dtype is torch.float32
    (found.sum() + found.prod()).backward()
    assert x.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_product_of_a_sparse_tensor_has_a_backward(dtype, engine):
    sparse, x = torch.eye(8).to_sparse().requires_grad_(), torch.randn(8, 4, requires_grad=True)
    with torch.autocast("cpu", dtype):
        expected = torch.sparse.mm(sparse.detach(), x.detach())
    with polycast.autocast("cpu", dtype):
        found = torch.sparse.mm(sparse, x)
    assert torch.equal(found, expected)
    assert found.dtype is expected.dtype
    gradients = torch.autograd.grad(found, (sparse, x), torch.ones_like(found))
    assert [each.dtype for each in gradients] == [torch.float32, torch.float32]


TAKEN = {
    "one value for a mask": ("b4x8 f1", lambda c, x, y: x.index_put((MASK,), y)),
    "a batch norm with a weight alone": ("b4x8 f8 f8! f8!", lambda c, x, w, m, v: batch_norm(x, w, None, m, v)),
    "an instance norm with a weight alone": ("b2x8x3 f8", lambda c, x, w: F.instance_norm(x, weight=w)),
    "a weight norm of the second dimension": ("b4x8x2 f1x8x1", lambda c, v, g: torch._weight_norm(v, g, 1)),
    "a layer norm with float32 weights": ("b4x8 f8 f8", lambda c, x, w, b: F.layer_norm(x, (8,), w, b)),
    "a layer norm with a weight alone": ("b4x8 f8", lambda c, x, w: F.layer_norm(x, (8,), w)),
    "a group norm with float32 weights": ("b2x8x3 f8 f8", lambda c, x, w, b: F.group_norm(x, 2, w, b)),
    "an interpolation by one weight": ("b4x8 b4x8 f1", lambda c, x, y, w: torch.lerp(x, y, w[0])),
    "the determinant of an empty matrix": ("b0x0", lambda c, x: torch.linalg.det(x)),
    "the distances of points without coordinates": ("b5x0!", lambda c, x: F.pdist(x)),
    "a maximum over a sparse matrix": (
        "b8x4",
        lambda c, x: torch.sparse.mm(torch.eye(8).bfloat16().to_sparse_csr(), x, "amax"),
    ),
    "a leaky ReLU": ("h4x8", lambda c, x: F.rrelu(x)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_mixture_that_torch_takes_keeps_its_bits(name, engine):
    text, program = TAKEN[name]
    expected = outcome(torch.autocast("cpu"), program, text, uncast)
    found = outcome(polycast.autocast("cpu"), program, text, uncast)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
