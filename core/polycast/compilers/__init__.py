"""Support for TorchScript, Dynamo and torch.export: regions in graphs, guards on overrides, cached casts."""
