"""Digests of tensors, which tell whether two have the same values.

A digest covers all bytes: otherwise it could miss a change of a single row, as by editing a model or training its
embeddings. A sample digest suffices to tell models apart, and leaves most pages of mapped weights unread. Both are
SHA-256, for which most processors have instructions. hashlib releases the GIL, so threads hash the chunks of all
tensors at once: several GB in a second.
"""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from polycast.plugin import memory_of

_CHUNK = 2**23
_SAMPLES, _SAMPLE = 64, 4096
"""The blocks of a sample of each tensor, and their bytes."""


def digests(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return a digest of each tensor: of its dtype, shape and values, in hexadecimal digits."""
    with torch.no_grad():
        dense = [tensor.cpu().contiguous() for tensor in tensors]  # not detached: an alias would keep casts from caches
    chunks = [(each, begin) for each in dense for begin in range(0, each.nbytes, _CHUNK)]
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        hashes = iter(list(pool.map(lambda chunk: _hash(_bytes(*chunk)), chunks)))
    found = []
    for each in dense:
        head = f"{each.dtype} {list(each.shape)}".encode()
        found.append(_hash(head + b"".join(next(hashes) for _ in range(0, each.nbytes, _CHUNK))).hex())
    return found


def sample_digests(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return a digest of each tensor: of its dtype and shape, and of a sample of its values, from start to end."""
    with torch.no_grad():
        return [_sample_digest(tensor.cpu().contiguous()) for tensor in tensors]


def _sample_digest(tensor: torch.Tensor) -> str:
    content = memory_of(tensor)
    last = max(len(content) - _SAMPLE, 0)
    begins = sorted({last * number // (_SAMPLES - 1) for number in range(_SAMPLES)})
    head = f"{tensor.dtype} {list(tensor.shape)}".encode()
    return _hash(head + b"".join(content[begin : begin + _SAMPLE] for begin in begins)).hex()


def digest_of_text(text: str) -> str:
    """Return a digest of a text, in hexadecimal digits."""
    return _hash(text.encode()).hex()


def _bytes(tensor: torch.Tensor, begin: int) -> memoryview:
    return memory_of(tensor)[begin : begin + _CHUNK]


def _hash(content: Any) -> bytes:
    return hashlib.sha256(content).digest()
