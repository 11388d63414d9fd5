"""The conformance suite: on the device if it is available, otherwise on fake tensors."""

import polycast
from polycast_plugins.testing import BackendConformance

PAIRS = "add.Tensor add_.Tensor sub.Tensor mul.Tensor div.Tensor divide.Tensor true_divide.Tensor"


class TestHpu(BackendConformance):
    backend = "hpu"
    fake = not polycast.is_autocast_available("hpu")
    samples = {
        **{f"aten::{name}": lambda make: (make(2, 3), make(2, 3)) for name in PAIRS.split()},
        **{f"aten::{name}": lambda make: (make(2, 3), 2.0) for name in ("add.Scalar", "mul.Scalar", "div.Scalar")},
        **{f"aten::{name}": lambda make: (make(2, 3),) for name in ("leaky_relu", "mean")},
        "aten::mean.dim": lambda make: (make(2, 3), [0]),
        "aten::dropout": lambda make: (make(2, 3), 0.5, False),
        "aten::embedding": lambda make: (make(4, 3), make.integers([0, 2])),
        "aten::topk": lambda make: (make(2, 3), 2),
        "aten::batch_norm": lambda make: (make(4, 3), *(make(3) for _ in range(4)), True, 0.1, 1e-5, False),
        "aten::instance_norm": lambda make: (make(4, 3, 2), make(3), make(3), None, None, True, 0.1, 1e-5, False),
    }
