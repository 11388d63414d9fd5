"""``polycast ops``: the policy table of a device, and its drift from the running torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from polycast import CastPolicy
from polycast.plugin import Backend, drift_of, explain_op, get_backend

from .terminal import console, library_errors, print_json, print_line, print_table, table


def show(
    device: Annotated[
        str, typer.Argument(metavar="DEVICE", help="The device, such as cpu or cuda; it need not be present.")
    ],
    cast_policy: Annotated[
        CastPolicy | None,
        typer.Option(
            metavar="NAME", case_sensitive=False, help="Show only the ops with this cast policy, such as fp32."
        ),
    ] = None,
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
    if drift and cast_policy is not None:
        raise typer.BadParameter("--cast-policy and --drift exclude each other: --drift is about all ops of the table.")
    if explain is not None and (drift or cast_policy is not None):
        raise typer.BadParameter("--explain is about one op: leave out --cast-policy and --drift.")
    if policy is not None and explain is None:
        raise typer.BadParameter(
            "--policy FILE needs --explain OP. To see the ops with one cast policy, write --cast-policy NAME."
        )
    if recipe is not None and explain is None:
        raise typer.BadParameter("--recipe needs --explain OP.")
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
        _show_drift(backend, as_json)
        return
    order = list(CastPolicy)
    policies = {**dict.fromkeys(backend.matched_ops, CastPolicy.MATCH), **backend.policies}
    ops = sorted(
        ((name, its) for name, its in policies.items() if cast_policy in (None, its)),
        key=lambda op: (order.index(op[1]), op[0]),
    )
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
    if ops:
        print_table(out, rows)
        out.print()
    policies = [policy for _, policy in ops]
    counts = [f"{policies.count(policy)} {policy.value}" for policy in dict.fromkeys(policies)]
    out.print(f"{device_type}: {len(ops)} ops" + (f" ({', '.join(counts)})" if counts else ""))


def _show_drift(backend: Backend, as_json: bool) -> None:
    found = drift_of(backend)
    if as_json:
        print_json(
            {
                "device_type": backend.device_type,
                "torch": torch.__version__,
                "only_in_torch": found.only_in_torch,
                "only_in_table": found.only_in_table,
                "skipped": found.skipped,
                "excluded_ops": found.excluded_ops,
            }
        )
        return
    out = console()
    if found:
        _print_differences(backend, out)
    else:
        count = len(backend.policies)
        line = f"{backend.device_type}: no drift. The table and torch {torch.__version__} have the same {count} ops."
        print_line(out, line)
    for name, reason in found.excluded_ops.items():
        print_line(out, f"{backend.device_type}: {name} runs torch's own kernel on purpose: {reason}")


def _print_differences(backend: Backend, out: Console) -> None:
    found = drift_of(backend)
    rows = table("op", "policy", "difference")
    for name in found.only_in_torch:
        rows.add_row(name, "-", "only in torch: torch's own kernel runs")
    for name in found.only_in_table:
        rows.add_row(name, backend.policies[name].value, "only in the table: torch does not autocast it")
    for name in found.skipped:
        rows.add_row(name, backend.policies[name].value, "this torch lacks the op: skipped")
    print_table(out, rows)
    out.print()
    out.print(
        f"{backend.device_type}: the table differs from torch {torch.__version__}: {len(found.only_in_torch)} ops only "
        f"in torch, {len(found.only_in_table)} only in the table, {len(found.skipped)} skipped.",
        soft_wrap=True,
    )
