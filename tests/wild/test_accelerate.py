"""accelerate: it decorates the model's forward with a region that it looks up in torch when the model is prepared."""

import pytest
import torch

import polycast

accelerate = pytest.importorskip("accelerate", reason="accelerate is in the extra 'test'")


def training(precision, dtypes):
    """Train for four steps; return the losses, and the dtype of an op in ``accelerator.autocast()``."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # it is one for the process
    accelerator = accelerate.Accelerator(mixed_precision=precision, cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    model[0].register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
    model, optimizer, batches = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, 8))
    losses = []
    for inputs, targets in batches:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with accelerator.autocast():
        losses.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
    return losses


def test_training_gives_torchs_losses(on_both, regions):
    dtypes = []
    theirs, ours = on_both(lambda: training("bf16", dtypes))
    assert ours == theirs
    assert ours[-1] is torch.bfloat16
    assert dtypes == [torch.bfloat16] * 8
    assert (
        regions == [("cpu", torch.bfloat16)] * 5
    )  # one for each call of the model, and that of accelerator.autocast()


def test_without_mixed_precision_no_region_is_entered(regions):
    dtypes = []
    with polycast.patch_torch():
        training("no", dtypes)
    assert regions == []
    assert dtypes == [torch.float32] * 4


class Branching(torch.nn.Module):
    """A model whose graph breaks, in the region that accelerate runs its forward in."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        z = self.layer(y) if y.sum() > 0 else self.layer(-y)
        return z, str(z.dtype)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler asks for it
def test_a_compiled_model_may_break_its_graph_in_the_region(on_both):
    from accelerate.state import AcceleratorState

    def program():
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.compiler.reset()
        accelerator = accelerate.Accelerator(mixed_precision="bf16", dynamo_backend="eager", cpu=True)
        model = accelerator.prepare(Branching())
        results = [model(sign * torch.ones(2, 4)) for sign in (1, -1, 1)]
        torch.compiler.reset()
        return [(y.tolist(), dtype) for y, dtype in results]

    theirs, ours = on_both(program)
    assert ours == theirs
    assert [dtype for _, dtype in ours] == ["torch.bfloat16"] * 3
