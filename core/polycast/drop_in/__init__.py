"""Running code that uses torch.autocast: ``patch_torch``, and ``polycast run``."""
