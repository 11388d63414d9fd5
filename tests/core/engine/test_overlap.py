"""Whether two tensors share memory."""

import torch
from torch._subclasses import FakeTensorMode

from polycast.engine.overlap import overlap

BASE = torch.zeros(4, 6)
PAIRS = {
    "itself": (BASE, BASE, True),
    "another": (BASE, torch.zeros(4, 6), False),
    "a row": (BASE, BASE[3], True),
    "two rows": (BASE[0], BASE[1], False),
    "two columns": (BASE[:, :2], BASE[:, 2:], False),
    "columns that meet": (BASE[:, :3], BASE[:, 2:], True),
    "even and odd": (BASE.view(-1)[::2], BASE.view(-1)[1::2], False),
    "transposed": (BASE.t()[2:], BASE[:, :3], True),
    "expanded": (BASE[:1].expand(9, 6), BASE[0, 5:], True),
    "empty": (BASE[:0], BASE, False),
    "detached": (BASE.detach(), BASE, True),
    "of another width": (BASE.view(torch.float16)[:, :2], BASE[:, :1], True),
    "of another width, apart": (BASE.view(torch.float16)[0], BASE[1], False),
    "sparse": (BASE.to_sparse(), BASE, False),
}


def test_tensors_overlap_that_have_an_element_in_common(subtests):
    for name, (one, other, expected) in PAIRS.items():
        with subtests.test(name):
            assert overlap(one, other) is overlap(other, one) is expected


def test_fake_tensors_overlap_where_their_ranges_do():
    with FakeTensorMode():
        base = torch.zeros(4, 6)
        assert overlap(base[:, :2], base[:, 2:])
        assert not overlap(base[0], base[1])
