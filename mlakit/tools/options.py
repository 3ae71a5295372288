"""What commands share: completion, errors of usage, options that would have no effect.

Each command lists which of its options cannot be combined. Only typed options count, whatever their
values; defaults do not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand

from mlakit.dispatch import knobs


class Command(TyperCommand):
    """A command that first checks that every environment variable of mlakit parses."""

    def invoke(self, ctx: Any) -> Any:
        with usage_errors():
            for knob in knobs.REGISTRY.values():
                knob()
        return super().invoke(ctx)


def completion(words: Iterable[str]) -> Callable[[str], list[str]]:
    """Return what completes an incomplete word to one of `words`."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


@contextmanager
def usage_errors() -> Iterator[None]:
    """A ValueError in this block is an error of the command line: exit status 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@contextmanager
def needs_transformers(command: str) -> Iterator[None]:
    """End with an error that says what to install if a module of transformers is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("transformers", "tokenizers"):
            raise
        typer.echo(
            f"Error: {command} needs transformers: pip install 'mlakit[transformers]'", err=True
        )
        raise typer.Exit(1) from None


def typed(context: typer.Context) -> dict[str, str]:
    """The typed options and arguments, by parameter, as they are spelled in messages."""
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
    """Raise BadParameter if one of `parameters` was typed; it replaces `{}` in `reason`."""
    for name, spelling in typed(context).items():
        if name in parameters:
            raise typer.BadParameter(reason.format(spelling))


def refuse_all_but(context: typer.Context, parameters: Collection[str], reason: str) -> None:
    """Raise BadParameter if anything except `parameters` was typed."""
    others = {parameter.name or "" for parameter in context.command.params} - set(parameters)
    refuse(context, others, reason)
