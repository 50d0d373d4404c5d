"""`tokamix neighbours`: the images of an index that are most similar to a photo."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from tokamix.cli._shared import console, plain_errors


def neighbours(
    photo: Annotated[Path, typer.Argument(help="An image file.")],
    index: Annotated[Path, typer.Option(help="A folder written by `tokamix embed`.")],
    k: Annotated[int, typer.Option(min=1, help="Number of images.")] = 11,
    output: Annotated[Path, typer.Option("--output", "-o", help="Image file for the contact sheet.")] = Path(
        "neighbours.png"
    ),
    source: Annotated[str | None, typer.Option(help="The model that made the index. Default: as it names it.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: a GPU if there is one.")] = None,
) -> None:
    """Show the images of an index that are most similar to a photo."""
    with plain_errors():
        from tokamix.embed import find_neighbours, write_neighbours

        found = find_neighbours(photo, index, k, source=source, device=device)
        table = Table(box=None, header_style="bold", pad_edge=False)
        table.add_column("similarity", justify="right")
        table.add_column("image")
        for one in found:
            table.add_row(f"{one.similarity:.4f}", escape(one.path))
        console.print(table)
        write_neighbours(output, photo, found, index)
        console.print(f"written: {output}", highlight=False, markup=False, soft_wrap=True)
