"""What compilers see of a region: TorchScript, Dynamo and torch.export, and the guard by which code knows policies."""
