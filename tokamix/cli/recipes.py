"""`tokamix recipes`: list the recipes, or print one."""

from typing import Annotated, Literal

import typer
from rich.table import Table

from tokamix.cli._shared import console, plain_errors

WIDE = 120  # characters of a terminal in which there is room for everything


def recipes(
    name: Annotated[str, typer.Argument(help="show all values of this one")] = "",
    model: Annotated[str | None, typer.Option(help="the model whose row to show, of a recipe for several")] = None,
) -> None:
    """List the recipes with what they were taken from, or show one as the file that would hold it."""
    with plain_errors():
        from tokamix.recipes import list_recipes, load_recipe, recipe_rows
        from tokamix.recipes.tables import duration, printed

        if name:
            print(load_recipe(name, model=model).to_yaml(), end="")
            return
        caption = "top-1, mIoU, box and mask AP as the paper prints them; `tokamix recipes NAME` shows every value"
        table = Table(box=None, header_style="bold", caption=caption, caption_justify="left")
        rows = [
            {
                "recipe": each.name,
                "model": each.model or "any",
                "length": duration(each),
                "printed": printed(each),
                "px": str(each.image_size if each.task == "classify" else (each.scale or ("",))[-1]),
                "source": each.source,
            }
            for known in list_recipes()
            for each in recipe_rows(known)
        ]
        shown = list(rows[0]) if console.width >= WIDE else ["recipe", "source"]
        for title in shown:
            named = title in ("recipe", "model", "length")  # whole, whatever becomes of the others
            widest = max(len(row[title]) for row in rows) if named else None
            justify: Literal["left", "right"] = "right" if title in ("length", "px") else "left"
            table.add_column(title, justify=justify, min_width=widest, no_wrap=named)
        for cells in dict.fromkeys(tuple(row[title] for title in shown) for row in rows):
            table.add_row(*cells)
        console.print(table)
