"""The first use of a device, in each state that the caller may be in: no plugin sees it, and nothing of it stays."""

import textwrap

import pytest

import polycast

from .conftest import environment

# A plugin whose import, answers and kernels run ops, and whose tensors are kept.
OPS = """
def noting(answer):
    def method(self, *asked):
        self.tables.append(made())
        return answer

    return method


class AcmeBackend(AcmeBackend):
    availability = recipe_availability = noting(polycast.plugin.Availability(True))
    slow_reason, low_bit_kernels = noting(None), noting({})

    def __init__(self):
        self.tables = [made()]


def made():
    table = torch.rand(4).to(torch.float32)
    assert bool(torch.ops.aten.is_nonzero(table.sum() + 1)) and table.sum().item() < 5
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.get_default_dtype()
    return table


@polycast.plugin.hookimpl
def polycast_backend():
    return AcmeBackend()
"""
USES = {
    "a region": "with polycast.autocast('cpu'): y = linear(x, w)",
    "a disabled region": "with polycast.autocast('cpu', enabled=False): y = linear(x, w)",
    "is_autocast_available": "assert polycast.is_autocast_available('cpu'); y = x * 1",
    "backends": "assert polycast.backends()['cpu'].state == 'ready'; y = x * 1",
    "a plugin": "with polycast.autocast('hpu'): y = x * 1",
}
if hasattr(polycast, "Int8"):
    USES["recipe="] = "with polycast.autocast('cpu', recipe='int8'): y = linear(x, w)"
    USES["a plugin"] = "with polycast.autocast('hpu', recipe='int8'): y = x * 1"
if hasattr(polycast, "patch_torch"):
    USES["patch_torch"] = "with polycast.patch_torch(), torch.autocast('cpu'): y = linear(x, w)"
MODES = """
class Refusing(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        assert op.namespace == "aten" and "rand" not in str(op), op
        return op(*args, **(kwargs or {}))


class RefusingFunctions(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert function not in (torch.rand, torch.ones, torch.mm), function
        return function(*args, **(kwargs or {}))


class Calling(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        use(x, w)
        return op(*args, **(kwargs or {}))


class Model(torch.nn.Module):
    def forward(self, x):
        return use(x, w)
"""
STATES = {
    "torch.jit.trace": "use.__module__ = 'use'; torch.jit.trace(use, (x, w), check_trace=False)",
    "torch.jit.trace_module": "torch.jit.trace_module(Model(), {'forward': x}, check_trace=False)",
    "FakeTensorMode": """
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            use(x, w)
    """,
    "a dispatch mode": "with Refusing(): use(x, w)",
    "a mode's handler": "with Refusing(), Calling(): x.neg()",
    "a function mode": "with RefusingFunctions(): use(x, w)",
    "vmap": "torch.vmap(lambda x: use(x, w))(x[None])",
    "grad": "torch.func.grad(lambda x: use(x, w).float().sum())(x)",
    "jvp": "torch.func.jvp(lambda x: use(x, w), (x,), (x,))",
    "functionalize": "torch.func.functionalize(lambda x: use(x, w))(x)",
    "make_fx": "torch.fx.experimental.proxy_tensor.make_fx(lambda x: use(x, w))(x)",
    "deterministic algorithms": "torch.use_deterministic_algorithms(True); use(x, w)",
    "a default device": "torch.set_default_device('meta'); use(x, w); torch.set_default_device(None)",
    "a default dtype": "torch.set_default_dtype(torch.float64); use(x, w); torch.set_default_dtype(torch.float32)",
    "inference mode": "with torch.inference_mode(): use(x, w)",
    "anomaly mode": "with torch.autograd.set_detect_anomaly(True): use(x, w)",
    "torch.autocast": "with torch.autocast('cpu'): use(x, w)",
    "warnings as errors": """
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", polycast.errors.SlowDtypeWarning)
            use(x, w)
    """,
}
SCRIPT = """
from torch.nn.functional import linear

x, w = torch.randn(64, 128), torch.randn(256, 128)

def use(x, w):
    {use}
    return y
{modes}
with torch.no_grad():
{state}
    use(x, w)
weight = torch.nn.Parameter(w)
with polycast.autocast("cpu"):
    y = linear(x, weight)
y.float().sum().backward()
answer = [y.dtype, weight.grad.dtype]
if polycast.is_autocast_available("hpu"):
    tables = polycast.plugin.get_backend("hpu").tables
    kinds = {{(type(each), each.device.type, each.is_inference()) for each in tables}}
    answer += [sorted(map(str, kind)) for kind in kinds]
"""


@pytest.fixture(scope="module")
def launched(start_launcher):
    """The same, with what the modes and transforms of the caller import, which takes long."""
    prepare = "import warnings; warnings.simplefilter('ignore'); import torch._dynamo, torch._functorch, polycast"
    return start_launcher(prepare, environment())


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_the_first_use_of_a_device_is_outside_the_state_of_its_caller(run, plugin, engine, state):
    plugin("acme-hpu", "hpu", OPS)
    answers = {}
    for name, use in USES.items():
        script = SCRIPT.format(use=use, modes=MODES, state=textwrap.indent(textwrap.dedent(STATES[state]), "    "))
        try:
            answers[name] = run(script, POLYCAST_ENGINE=engine)
        except AssertionError as error:
            answers[name] = str(error)[-400:]
    expected = ["torch.bfloat16", "torch.float32", ["<class 'torch.Tensor'>", "False", "cpu"]]
    assert answers == dict.fromkeys(USES, expected)


INTERRUPTS = """
import functools, signal

class Alarm(Exception):
    pass

def ring(number, frame):
    raise Alarm("time is up")

"""


@pytest.mark.parametrize("handler", ["ring", "functools.partial(ring)"])  # test_interrupts.py has the others
@pytest.mark.parametrize("where", ["import", "hook", "availability"])
def test_what_a_signals_handler_raises_is_the_callers_and_not_remembered(run, plugin, handler, where):
    interrupt = (
        "    if not hasattr(sys, 'rung'):\n        sys.rung = True\n        signal.raise_signal(signal.SIGUSR1)\n"
    )
    amendment = {
        "import": f"if True:\n{interrupt}",
        "hook": f"@polycast.plugin.hookimpl\ndef polycast_backend():\n{interrupt}    return AcmeBackend()\n",
        "availability": f"def availability(self):\n{interrupt}    return polycast.plugin.Availability(True)\n"
        "AcmeBackend.availability = availability\n",
    }[where]
    plugin("acme-hpu", "hpu", f"import signal, sys\n{amendment}")
    answer = run(f"""{INTERRUPTS}
signal.signal(signal.SIGUSR1, {handler})
answer = [error_of(polycast.is_autocast_available, "hpu"), polycast.is_autocast_available("hpu")]
""")
    assert answer == [["Alarm", "time is up"], True]


@pytest.mark.parametrize("error", ["MemoryError()", "RecursionError('too deep')", "DeprecationWarning('old')"])
def test_an_error_that_the_caller_may_have_caused_is_not_remembered(run, plugin, error):
    plugin("acme-hpu", "hpu", f"import sys\nif not hasattr(sys, 'failed'):\n    sys.failed = True\n    raise {error}")
    answer = run("answer = [error_of(polycast.plugin.get_backend, 'hpu')[0], polycast.is_autocast_available('hpu')]")
    assert answer == ["BackendBrokenError", True]
