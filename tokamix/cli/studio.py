"""`tokamix studio`: a local page to look at models, compare them, and train small ones."""

from pathlib import Path
from typing import Annotated

import typer

from tokamix.cli._shared import plain_errors


def studio(
    folders: Annotated[
        list[Path] | None,
        typer.Option("--folder", help="A folder whose runs and images the page may use; repeat it for several."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; others than this machine's need a password.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="<int>", help="0: a free one.")] = 7860,
    password: Annotated[
        str | None,
        typer.Option(
            envvar="TOKAMIX_STUDIO_PASSWORD", help="Password, asked for before the page is shown.", show_envvar=False
        ),
    ] = None,
    max_upload: Annotated[int, typer.Option(min=1, metavar="<int>", help="Largest uploaded file, in megabytes.")] = 20,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: a GPU if there is one.")] = None,
    browser: Annotated[bool, typer.Option(help="Open the page in the browser.")] = True,
) -> None:
    """Open a local page: see what token mixers do with a photo, click on a token, compare models.

    Only this machine reaches the page, unless --host says otherwise. The page reads no file but uploads and what lies
    below --folder.
    """
    with plain_errors():
        from tokamix.studio import StudioSettings, run_studio
        from tokamix.studio.settings import MEGABYTE, is_loopback

        if password is None and not is_loopback(host):
            password = typer.prompt(f"{host} can be reached by other machines. Password", hide_input=True)
        settings = StudioSettings(
            host=host,
            port=port,
            folders=tuple(folders or ()),
            password=password,
            max_upload_bytes=max_upload * MEGABYTE,
            device=device,
            open_browser=browser,
        )
        run_studio(settings)
