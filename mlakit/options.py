"""What was typed on the command line, and the refusal of what would do nothing.

An option without effect is an error and not a surprise: each command says which of its options have
no meaning beside others, and only those that were typed count, whatever their values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand

from mlakit import knobs


class Command(TyperCommand):
    """A command that runs only if every environment variable of mlakit has a value that parses."""

    def invoke(self, ctx: Any) -> Any:
        with usage_errors():
            for knob in knobs.REGISTRY.values():
                knob()
        return super().invoke(ctx)


@contextmanager
def usage_errors() -> Iterator[None]:
    """A ValueError in this block says what is wrong with the command line: exit status 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def typed(context: typer.Context) -> dict[str, str]:
    """By parameter of the command: the options and arguments that were typed, as they are shown."""
    found = {}
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        if parameter.param_type_name == "argument":
            found[name] = parameter.metavar or name.upper()
        elif context.params[name] is False and parameter.secondary_opts:
            found[name] = parameter.secondary_opts[-1]
        else:
            found[name] = parameter.opts[-1]
    return found


def refuse(context: typer.Context, parameters: Collection[str], reason: str) -> None:
    """BadParameter if one of `parameters` was typed; `{}` in `reason` stands for it."""
    for name, spelling in typed(context).items():
        if name in parameters:
            raise typer.BadParameter(reason.format(spelling))


def refuse_all_but(context: typer.Context, parameters: Collection[str], reason: str) -> None:
    """BadParameter if anything else than `parameters` was typed."""
    others = {parameter.name or "" for parameter in context.command.params} - set(parameters)
    refuse(context, others, reason)
