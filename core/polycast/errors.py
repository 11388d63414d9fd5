"""What polycast raises and warns with; each class is also the standard one that code written for torch catches."""


class BackendNotFoundError(RuntimeError):
    """No backend is registered for a device type that torch knows."""


class BackendBrokenError(RuntimeError):
    """A backend's plugin is installed, but cannot be loaded or breaks the contract; the cause is chained."""


class BackendConflictError(RuntimeError):
    """Several distributions supply the backend of one device type, and nothing says which to take."""


class InvalidBackendError(ValueError):
    """An object offered as a backend does not keep the contract of :class:`polycast.Backend`."""


class StaleWeightError(RuntimeError):
    """A WeightCache with ``verify=True`` found that a weight was changed behind its back."""


class AutocastDisabledWarning(UserWarning):
    """A region was asked for that the device or its backend cannot give; it runs with autocast disabled."""
