"""Describe a matrix in a parameter as text, and find it again, as files of calibrations do."""

import pytest
import torch

from polycast_plugins.quantize.weight_matrices import matrix_in, view_of


@pytest.mark.parametrize("part", [slice(None), slice(0, 2), slice(2, 4)])
def test_a_view_is_found_again(part, subtests):
    for offset in [0, 8]:
        with subtests.test(offset=offset):
            parameter = torch.nn.Parameter(torch.arange(24.0)[offset : offset + 16].view(4, 4))
            for matrix in (parameter.detach()[part], parameter.detach()[part].t()):
                assert torch.equal(matrix_in(parameter, view_of(matrix, parameter)), matrix)


def test_what_is_not_in_the_parameter_is_refused(subtests):
    for view in ["-1,2,4,4,1", "12,2,4,4,1", "0,5,4,4,1", "0,4", "a,b", "0,2,4,-4,1"]:
        refusal = pytest.raises(ValueError, match="is no view of a parameter|invalid literal|not enough values")
        with subtests.test(view=view), refusal:
            matrix_in(torch.nn.Parameter(torch.arange(24.0)[4:20].view(4, 4)), view)
