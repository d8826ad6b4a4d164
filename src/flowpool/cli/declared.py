"""Options of a command out of the records that declare them (`flowpool.lab.options`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer


def with_options(*groups: tuple[type, str | None, bool]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: the command takes the options that some records declare, and gets them by the names of the fields.

    Args:
        groups: a record, the panel of its options in the help, and whether that is shown with ``--help-all`` alone. An
            option that is not given is None, so that a command can tell.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        given = [parameter for parameter in own if parameter.kind is not parameter.VAR_KEYWORD]
        more = [_parameter(kind, name, panel, hidden) for kind, panel, hidden in groups for name in _names(kind)]
        signature = inspect.Signature([*given, *more])
        command.__signature__ = signature  # type: ignore[attr-defined]
        command.__annotations__ = {name: each.annotation for name, each in signature.parameters.items()}
        return command

    return decorate


def show_all(context: typer.Context, asked: bool) -> None:
    """Callback of ``--help-all``: the help with every option."""
    if asked:
        for parameter in context.command.params:
            parameter.hidden = False  # type: ignore[attr-defined]
        typer.echo(context.get_help())
        raise typer.Exit


def _names(kind: type) -> list[str]:
    return [field.name for field in fields(kind) if "about" in field.metadata]


def _parameter(kind: type, name: str, panel: str | None, hidden: bool) -> inspect.Parameter:
    field = next(field for field in fields(kind) if field.name == name)
    meta, default = field.metadata, None if field.default is MISSING else field.default
    flags = [] if meta["flag"] is None else meta["flag"].split(",")
    annotation = _on_the_command_line(get_type_hints(kind)[name])
    shown = meta["usual"] if meta["usual"] is not None else default
    option = typer.Option(
        *flags,
        help=meta["about"],
        show_default=False if shown is None else str(_text(shown)),
        rich_help_panel=panel,
        hidden=hidden,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[annotation | None, option]
    )


def _text(default: Any) -> Any:
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return ("yes" if default else "no") if isinstance(default, bool) else default


def _on_the_command_line(kind: Any) -> Any:
    """The type of an option for a field: lists are text, and None is what is not given."""
    arguments = [argument for argument in get_args(kind) if argument is not NoneType]
    if get_origin(kind) is tuple:
        return str
    if get_origin(kind) is Literal:
        return kind
    return arguments[0] if len(arguments) == 1 else kind
