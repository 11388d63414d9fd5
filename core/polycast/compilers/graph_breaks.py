"""Break the graph that Dynamo traces.

Imported when Dynamo traces.
"""

from typing import NoReturn

from ..torch_internals.lookup import find


def break_graph(what: str, explanation: str, hint: str) -> NoReturn:
    """Break the graph that Dynamo traces: the interpreter runs the code, or the user gets an error (``fullgraph``).

    Called by functions that Dynamo calls while it traces.

    Args:
        what: the same text for each graph that is broken for the same reason.
        explanation: why, as a sentence.
        hint: what the user can do.
    """
    try:
        unimplemented = find("torch._dynamo.exc.unimplemented")
    except (AttributeError, ImportError):
        raise RuntimeError(f"polycast: {explanation}") from None
    unimplemented(gb_type=what, context="", explanation=f"polycast: {explanation}", hints=[hint])
    raise AssertionError  # unimplemented has raised
