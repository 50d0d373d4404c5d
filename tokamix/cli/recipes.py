"""`tokamix recipes`: list the recipes, or print one."""

from typing import Annotated, Literal

import typer
from rich.table import Table

from tokamix.cli._shared import WIDE, console, plain_errors


def recipes(
    name: Annotated[str, typer.Argument(help="Print all values of this recipe.")] = "",
    model: Annotated[str | None, typer.Option(help="The row of this model, if the recipe has several.")] = None,
) -> None:
    """List the recipes with their sources, or print one as a YAML file."""
    with plain_errors():
        from tokamix.recipes import list_recipes, load_recipe, recipe_rows
        from tokamix.recipes.tables import duration, printed

        if name:
            print(load_recipe(name, model=model).to_yaml(), end="")
            return
        wide = console.width >= WIDE
        caption = (
            "printed: the paper's top-1, mIoU, AP, linear and 20-NN; " if wide else "a wider terminal shows more; "
        )
        caption += "`tokamix recipes NAME` prints every value"
        table = Table(box=None, header_style="bold", caption=caption, caption_justify="left")
        rows = [
            {
                "recipe": row.name,
                "model": row.model or "any",
                "length": duration(row),
                "printed": printed(row),
                "px": str(getattr(row, "image_size", None) or (getattr(row, "scale", None) or ("",))[-1]),
                "source": row.source,
            }
            for recipe in list_recipes()
            for row in recipe_rows(recipe)
        ]
        columns = list(rows[0]) if wide else ["recipe", "source"]
        for title in columns:
            whole = title in ("recipe", "model", "length")  # never shortened
            widest = max(len(row[title]) for row in rows) if whole else None
            justify: Literal["left", "right"] = "right" if title in ("length", "px") else "left"
            table.add_column(title, justify=justify, min_width=widest, no_wrap=whole)
        for cells in dict.fromkeys(tuple(row[title] for title in columns) for row in rows):
            table.add_row(*cells)
        console.print(table)
