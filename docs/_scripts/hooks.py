"""MkDocs hooks: the command line page lists the options that the commands have when the site is built."""

import re
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer.main
from typer.core import TyperArgument

from tokamix.cli import app

MARK = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace(MARK, commands()) if MARK in markdown else markdown


def commands() -> str:
    """A section for each command: its help, and its arguments and options in a table."""
    group: Any = typer.main.get_command(app)
    parts = []
    for name, command in group.commands.items():
        types = get_type_hints(command.callback)
        rows = [
            f"| {shown(parameter)} | {meaning(parameter, types.get(parameter.name))} | {default(parameter)} |"
            for parameter in command.params
            if parameter.name != "help"
        ]
        table = ["", "| argument or option | meaning | default |", "|---|---|---|", *rows] if rows else []
        parts.append("\n".join([f"## tokamix {name}", "", command.help or "", *table]))
    return "\n\n".join(parts)


def shown(parameter: Any) -> str:
    if isinstance(parameter, TyperArgument):
        return f"`{parameter.name.upper().removesuffix('_')}`" + ("" if parameter.required else " (optional)")
    return ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))


def meaning(parameter: Any, annotation: Any) -> str:
    """The help, after the values that are possible where these are a few words."""
    words = ", ".join(f"`{word}`" for word in choices(annotation))
    return f"{words}. {escape(parameter.help or '')}" if words else escape(parameter.help or "")


def choices(annotation: Any) -> tuple[str, ...]:
    """The words of the Literal in a type."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(word for part in get_args(annotation) for word in choices(part))


def default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    if value is None or value == "" or callable(value) or "UNSET" in repr(value).upper():
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def escape(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", r"\|").replace("<", "&lt;")
