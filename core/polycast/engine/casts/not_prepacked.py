"""Why a weight is not prepacked, as messages."""

INTERCEPTED = "something records, transforms or watches the ops"
NO_WEIGHT = "its weight is not a cacheable parameter or a plain view of one (it is a subclass, or the result of an op)"
NOT_CACHED = "weights are not cached here (cache_enabled=False, or a device's graph is being captured)"
WRITTEN_UNSEEN = (
    "something else holds the weight's memory and may write it unseen (an alias made through .data, an array, a buffer "
    "that it is a part of, another process)"
)
NO_ROOM = "the WeightCache has no room for its prepacked weight within max_bytes"
VIEWS_ARE_FULL = "the prepacked views of its weight take as much memory as the weight"

NOT_PREPACKED = {
    "INTERCEPTED": INTERCEPTED,
    "NO_WEIGHT": NO_WEIGHT,
    "NOT_CACHED": NOT_CACHED,
    "WRITTEN_UNSEEN": WRITTEN_UNSEEN,
    "NO_ROOM": NO_ROOM,
    "VIEWS_ARE_FULL": VIEWS_ARE_FULL,
}
"""By name, in the order of the native engine's enumeration (native/recipes/prepacked.h), which checks it."""
