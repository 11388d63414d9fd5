"""``polycast ops``: the policy table of a device, and what happens to an op."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from polycast import CastPolicy
from polycast.plugin import explain_op, get_backend

from .ops_drift import show_drift
from .terminal import console, library_errors, print_json, print_line, print_table, table


def show(
    device: Annotated[
        str, typer.Argument(metavar="DEVICE", help="The device, such as cpu or cuda; it need not be present.")
    ],
    explain: Annotated[
        str | None, typer.Option(metavar="OP", help="Explain what a region does with an op, and by which rule.")
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --explain: explain the op in a region with this policy file."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --explain: explain the op in a region with this recipe, such as int8."),
    ] = None,
    drift: Annotated[bool, typer.Option("--drift", help="Show where the table and the running torch differ.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the op table of a device: the cast policy of each op."""
    if explain is not None and drift:
        raise typer.BadParameter("--explain is about one op, --drift about all: leave out one of the two.")
    if explain is None and (policy is not None or recipe is not None):
        raise typer.BadParameter("--policy and --recipe need --explain OP.")
    with library_errors():
        backend = get_backend(device)
        if explain is not None:
            explained = explain_op(explain, device, policy=policy, recipe=recipe, enabled=True)
    if explain is not None:
        if as_json:
            print_json(explained.to_dict())
        else:
            for line in str(explained).splitlines():
                print_line(console(), line)
        return
    if drift:
        show_drift(backend, as_json)
        return
    order = list(CastPolicy)
    policies = {**dict.fromkeys(backend.matched_ops, CastPolicy.MATCH), **backend.policies}
    ops = sorted(policies.items(), key=lambda op: (order.index(op[1]), op[0]))
    if as_json:
        print_json([{"op": name, "policy": its.value} for name, its in ops])
    else:
        _print(backend.device_type, ops)


def _print(device_type: str, ops: Sequence[tuple[str, CastPolicy]]) -> None:
    out = console()
    rows = table("op", "policy")
    for position, (name, policy) in enumerate(ops):
        last_of_policy = position + 1 == len(ops) or ops[position + 1][1] is not policy
        rows.add_row(name, policy.value, end_section=last_of_policy)
    print_table(out, rows)
    out.print()
    policies = [policy for _, policy in ops]
    counts = [f"{policies.count(policy)} {policy.value}" for policy in dict.fromkeys(policies)]
    out.print(f"{device_type}: {len(ops)} ops ({', '.join(counts)})")
