"""The arithmetic of the CPU's int4 kernels in plain torch, as `polycast_plugins.quantize.cpu.int4` describes it."""

import torch

LEAST = 2.0**-110


def chunk_of(terms, group_size):
    """Return the terms of a group and of a chunk."""
    group = min(group_size, -(-terms // 8) * 8)
    return group, max(1, 256 // group) * group


def quantize(weight, group_size):
    """Return the values [N, K] of a quantized weight as integers, and the scales [N, chunks]."""
    group, chunk = chunk_of(weight.shape[1], group_size)
    integers, scales = [], []
    for part in weight.float().split(chunk, 1):
        scale = (part.abs().amax(1, keepdim=True).clamp(min=LEAST) / 120).bfloat16().float()
        scales.append(scale)
        integers += [_best(terms) for terms in (part * (1 / scale)).split(group, 1)]
    return torch.cat(integers, 1), torch.cat(scales, 1)


def _best(terms):
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


def product(x, weight, group_size, bias=None, dtype=torch.float32):
    """Return ``x @ weight.T + bias`` for finite activations [M, K] and a weight as :func:`unpack` returns it."""
    integers, scales = weight
    _, chunk = chunk_of(x.shape[1], group_size)
    total = torch.zeros(x.shape[0], integers.shape[0])
    for number, (part, of_weight) in enumerate(zip(x.float().split(chunk, 1), integers.split(chunk, 1), strict=True)):
        scale = part.abs().amax(1, keepdim=True).clamp(min=LEAST) / 127
        levels = (part * (1 / scale)).round().double()
        scaled = (levels @ of_weight.double().t()).float() * scales[:, number]
        total = (scaled.double() * scale.double() + total.double()).float()  # a fused multiply-add
    return (total if bias is None else total + bias.float()).to(dtype)
