"""The CPU's kernels of matmuls: how to call each kind, and the arithmetic that defines its results, in plain torch."""

import torch
import torch.nn.functional as F

import polycast
from polycast_plugins.quantize.cpu.few_rows import FewRowsMatmul, few_rows_availability
from polycast_plugins.quantize.cpu.int4 import Int4Matmul
from polycast_plugins.quantize.cpu.int8 import Int8Matmul
from polycast_plugins.testing.low_bit import run_prepacked

INT8 = polycast.plugin.check(polycast.plugin.get_backend("cpu"), polycast.Int8())
FEW_ROWS = few_rows_availability()
SETS = ("plain", "avx2", "avx512")
SIMDS = range(torch.ops.polycast_cpu.best_simd() + 1 if FEW_ROWS else 1)
LEAST = 2.0**-110


class Kind:
    """A kind of matmuls, computed by a set of instructions.

    Attributes:
        dtype: the dtype of results, by default.
        dtypes: the dtypes that results may have.
        rows: numbers of rows of activations to test it with.
    """

    dtype = torch.float32
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    rows = (1, 3, 4, 20, 40)

    def __init__(self, matmul):
        self.matmul = matmul

    def kernel(self, op):
        return self.matmul.kernels()[f"aten::{op}"]

    def prepared(self, kernel, weight, dtype, *factors):
        return kernel.prepack(weight, *factors)

    def run(self, op, *args, dtype=None, factors=()):
        """Prepack the weight, with the factors of a calibration, and call the kernel of an op."""
        kernel, dtype = self.kernel(op), dtype or self.dtype
        assert kernel.unsupported_reason(*args) is None
        return run_prepacked(kernel, self.prepared(kernel, args[kernel.weight], dtype, *factors), *args, dtype=dtype)

    def linear(self, x, weight, bias=None, dtype=None, factors=()):
        return self.run("linear", x, weight, bias, dtype=dtype, factors=factors)

    def check(self, x, weight, bias=None, dtype=None):
        """Check a product of matrices against its definition, and return it."""
        actual = self.linear(x, weight, bias, dtype)
        self.compare(actual, x, weight, bias)
        return actual

    def value(self, x, weight):
        """Return a product before it is rounded to the fast dtype."""
        return self.linear(x, weight)


class Int8(Kind):
    """Int8 products with a scale for each row of the activations."""

    by_row = True

    def __init__(self, isa=None):
        super().__init__(Int8Matmul(self.by_row, isa))

    def compare(self, actual, x, weight, bias):
        expected = int8_definition(x, weight, bias, actual.dtype, self.by_row)
        assert torch.equal(actual.isnan(), expected.isnan())
        assert torch.equal(actual.nan_to_num(1e4), expected.nan_to_num(1e4))


class Int8OneScale(Int8):
    by_row = False


class Int4(Kind):
    def __init__(self, isa=None, group_size=32):
        super().__init__(Int4Matmul(group_size, isa))
        self.group_size = group_size

    def compare(self, actual, x, weight, bias):
        values, _ = self.kernel("linear").prepack(weight)
        unpacked = unpack(values, *weight.shape, self.group_size)
        expected = int4_definition(x, unpacked, self.group_size, bias, actual.dtype)
        # Equal, but for the last bit where a fused multiply-add was rounded twice.
        torch.testing.assert_close(actual, expected, rtol=torch.finfo(actual.dtype).eps, atol=0, equal_nan=True)
        assert (actual == expected).double().mean() > 0.99 or actual.numel() < 200


class FewRows(Kind):
    """Products of a few rows by a weight's cast, at least as exact as torch's."""

    dtype = torch.bfloat16
    dtypes = (torch.bfloat16, torch.float16)
    rows = (1, 3, 4, 8)

    def __init__(self, simd=None, of_weight=None):
        super().__init__(FewRowsMatmul(simd))
        self.of_weight = of_weight  # the dtype of the cast; by default that of the result

    def prepared(self, kernel, weight, dtype):
        return (weight.to(self.of_weight or dtype),)

    def exact(self, x, weight, bias=None, dtype=None):
        """Return the product in float64, and the error that float32 sums and one rounding may have."""
        dtype = dtype or self.dtype
        x, weight = x.double(), weight.to(self.of_weight or dtype).double()
        sums = F.linear(x, weight, None if bias is None else bias.double())
        magnitude = F.linear(x.abs(), weight.abs(), None if bias is None else bias.double().abs())
        limits = torch.finfo(dtype)
        return sums, sums.abs() * limits.eps / 2 * 1.01 + magnitude * 2e-6 + limits.smallest_normal * limits.eps

    def compare(self, actual, x, weight, bias):
        expected, error = self.exact(x, weight, bias, actual.dtype)
        assert actual.shape == expected.shape
        off = ((actual.double() - expected).abs() / error).max().item()
        assert off <= 1, f"the error is {off:.3g} times the bound"

    def value(self, x, weight):
        return self.exact(x, weight)[0]


LAYOUTS = {
    "dense": lambda rows, width, make=torch.randn: make(rows, width),
    "transposed": lambda rows, width, make=torch.randn: make(width, rows).t(),
    "expanded": lambda rows, width, make=torch.randn: make(1, width).expand(rows, width),
    "one number": lambda rows, width, make=torch.randn: make(1, 1).expand(rows, width),
    "overlapping": lambda rows, width, make=torch.randn: make(rows + width).as_strided((rows, width), (1, 1)),
    "overlapping rows": lambda rows, width, make=torch.randn: make(3 * rows + width).as_strided((rows, width), (3, 1)),
    "steps": lambda rows, width, make=torch.randn: make(2 * rows, 3 * width)[::2, ::3],
    "slice": lambda rows, width, make=torch.randn: make(rows, width + 3)[:, 1 : width + 1],
}

# ---- Int8.


def int8_levels(matrix, by_row):
    """Return integers from -127 to 127, and the scale of each row; 0 for a row with inf or nan."""
    matrix = matrix.float()
    largest = matrix.abs().amax(-1, keepdim=True)
    finite = largest.isfinite()
    largest = torch.where(finite, largest.clamp(min=LEAST), 0)
    largest = torch.where(finite, largest if by_row else largest.max(), 0)
    scale = largest / 127
    return torch.where(finite, (matrix * (1 / scale)).round(), 0), scale


def int8_definition(x, weight, bias, dtype, by_row):
    """Return what an int8 product is defined as, computed by torch's ops."""
    (x_levels, x_scale), (weight_levels, weight_scale) = int8_levels(x, by_row), int8_levels(weight, True)
    sums = F.linear(x_levels.double(), weight_levels.double())  # exact
    value = sums.float() * weight_scale.t() * x_scale
    others = ~x.isfinite().all(-1)
    if others.any():  # inf and nan alone, with the quantized weight
        alone = torch.where(x[others].isfinite(), 0, x[others].float())
        value[others] = _of_inf_and_nan(alone, weight_levels)
    return (value if bias is None else value + bias.float()).to(dtype)


def _of_inf_and_nan(x, weight):
    """Multiply rows of inf, nan and zeros, without the zeros: inf * 0 counts, 0 * inf does not."""
    result = torch.zeros(len(x), len(weight))
    for row, values in zip(result, x, strict=True):
        for k in ((values != 0) | values.isnan()).nonzero().flatten():
            row += values[k] * weight[:, k]
    return result


# ---- Int4.


def chunk_of(terms, group_size):
    """Return the terms of a group and of a chunk."""
    group = min(group_size, -(-terms // 8) * 8)
    return group, max(1, 256 // group) * group


def int4_quantized(weight, group_size):
    """Return the values [N, K] of a quantized weight as integers, and the scales [N, chunks]."""
    group, chunk = chunk_of(weight.shape[1], group_size)
    integers, scales = [], []
    for part in weight.float().split(chunk, 1):
        scale = (part.abs().amax(1, keepdim=True).clamp(min=LEAST) / 120).bfloat16().float()
        scales.append(scale)
        integers += [_nearest(terms) for terms in (part * (1 / scale)).split(group, 1)]
    return torch.cat(integers, 1), torch.cat(scales, 1)


def _nearest(terms):
    """Return the products of level and multiplier that are nearest to the terms of a group."""
    largest = terms.gather(1, terms.abs().argmax(1, keepdim=True))
    near = (largest / -8).round()
    best, least = torch.zeros_like(terms), torch.full_like(largest, torch.inf)
    for multiplier in (near, near - 1, near + 1, -largest.sign(), torch.ones_like(near)):
        usable = (multiplier != 0) & (multiplier.abs() <= 15) & ((near != 0) | (multiplier.abs() == 1))
        by = torch.where(usable, multiplier, 1.0)
        values = (terms / by).clamp(-8, 7).round() * by
        error = (values - terms).double().square().sum(1, keepdim=True)
        better = usable & (error < least)
        best, least = torch.where(better, values, best), torch.where(better, error, least)
    return best


def unpack(packed, columns, terms, group_size):
    """Return the values and scales of a packed weight, read from its layout."""
    group, chunk = chunk_of(terms, group_size)
    integers, scales, at = [], [], 0

    def take(count, dtype=torch.uint8):
        nonlocal at
        at += count
        return packed[:, at - count : at].contiguous().view(dtype)

    for first in range(0, terms, chunk):
        count = min(chunk, terms - first)
        scales.append(take(128, torch.bfloat16).float().reshape(-1))
        for start in range(0, count, group):
            size = min(group, count - start)
            multipliers = take(64, torch.int8).float()
            eights = -(-size // 8)
            both = take(256 * eights).view(-1, eights, 64, 4)
            levels = torch.cat((both & 15, both >> 4), 3).float() - 8
            values = levels * multipliers[:, None, :, None]
            integers.append(values.transpose(1, 2).reshape(-1, 8 * eights)[:, :size])
    assert at == packed.shape[1]
    return torch.cat(integers, 1)[:columns], torch.stack(scales, 1)[:columns]


def int4_definition(x, weight, group_size, bias=None, dtype=torch.float32):
    """Return ``x @ weight.T + bias`` as `polycast_plugins.quantize.cpu.int4` describes it.

    Args:
        x: finite activations [M, K].
        weight: as :func:`unpack` returns it.
    """
    integers, scales = weight
    _, chunk = chunk_of(x.shape[1], group_size)
    total = torch.zeros(x.shape[0], integers.shape[0])
    for number, (part, of_weight) in enumerate(zip(x.float().split(chunk, 1), integers.split(chunk, 1), strict=True)):
        scale = part.abs().amax(1, keepdim=True).clamp(min=LEAST) / 127
        levels = (part * (1 / scale)).round().double()
        scaled = (levels @ of_weight.double().t()).float() * scales[:, number]
        total = (scaled.double() * scale.double() + total.double()).float()  # a fused multiply-add
    return (total if bias is None else total + bias.float()).to(dtype)
