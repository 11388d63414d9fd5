"""Lightning Fabric: its precision plugin makes a region, by its name in torch, for each forward."""

import pytest
import torch

fabric = pytest.importorskip("lightning_fabric", reason="lightning-fabric is in the extra 'test'")


def test_training_gives_torchs_losses(on_both, regions):
    dtypes = []

    def program():
        runner = fabric.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        model[0].register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
        model, optimizer = runner.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        inputs, targets = torch.randn(32, 8), torch.randn(32, 1)
        losses = []
        for _ in range(4):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            runner.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        with runner.autocast():
            losses.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        return losses

    theirs, ours = on_both(program)
    assert ours == theirs
    assert ours[-1] is torch.bfloat16
    assert dtypes == [torch.bfloat16] * 8
    assert regions == [("cpu", torch.bfloat16)] * 5
