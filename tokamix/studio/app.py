"""The page: its tabs, its server, and how it starts and ends."""

import hmac
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from tokamix.studio._gradio import gr
from tokamix.studio.compare import add_compare_tab
from tokamix.studio.dense import add_dense_tab
from tokamix.studio.look import add_look_tab
from tokamix.studio.routes import only_needed_routes
from tokamix.studio.settings import StudioSettings
from tokamix.studio.train import add_train_tab

CSS = Path(__file__).with_name("studio.css")
CACHE_SECONDS = 3600  # uploaded files are deleted after this time, and when the studio ends
QUEUE_SIZE = 100
SESSIONS = 100  # open pages whose values are kept, 0.3 MB each


def create_app(settings: StudioSettings) -> gr.Blocks:
    """Build the page; nothing is served yet."""
    with gr.Blocks(title="tokamix studio", analytics_enabled=False, delete_cache=(CACHE_SECONDS,) * 2) as app:
        gr.Markdown("# tokamix studio", elem_id="title")
        add_look_tab(settings)
        add_compare_tab(settings)
        add_train_tab(settings)
        add_dense_tab(settings)
    return app.queue(default_concurrency_limit=1, max_size=QUEUE_SIZE, api_open=False)


def start_studio(settings: StudioSettings) -> gr.Blocks:
    """Serve the page and return at once; `app.local_url` is its address, `app.close()` ends it."""
    app = create_app(settings)
    app.launch(
        server_name=settings.host,
        server_port=settings.port or None,
        auth=_password_check(settings.password),
        share=False,
        inbrowser=settings.open_browser,
        prevent_thread_lock=True,
        quiet=True,
        show_error=True,  # ours are sentences: see errors.py
        state_session_capacity=SESSIONS,
        allowed_paths=[],
        app_kwargs={"middleware": [only_needed_routes(settings.host)]},
        max_file_size=settings.max_upload_bytes,
        footer_links=["settings"],
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
        theme=_theme(),
        css_paths=CSS,
    )
    return app


def run_studio(settings: StudioSettings) -> None:
    """Serve the page until the process is interrupted or terminated."""
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    handlers = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        app = start_studio(settings)
        print(f"tokamix studio: {app.local_url} (Ctrl+C ends it)", flush=True)
        ended.wait()
        app.close()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _password_check(password: str | None) -> Any:
    """Gradio's check of a login: any user name, one password."""
    if password is None:
        return None
    return lambda user, given: hmac.compare_digest(given.encode(), password.encode())


def _theme() -> Any:
    """Colours of the house; fonts of the reader's system, so that nothing is downloaded."""
    sans, mono = ("system-ui", "sans-serif"), ("ui-monospace", "monospace")
    theme = gr.themes.Base(primary_hue="blue", neutral_hue="slate", font=sans, font_mono=mono)
    soft = {"light": "*neutral_600", "dark": "*neutral_300"}  # Gradio's own have too little contrast
    return theme.set(
        body_text_color_subdued=soft["light"],
        body_text_color_subdued_dark=soft["dark"],
        block_info_text_color=soft["light"],
        block_info_text_color_dark=soft["dark"],
        block_label_text_color=soft["light"],
        block_label_text_color_dark=soft["dark"],
        block_title_text_color=soft["light"],
        block_title_text_color_dark=soft["dark"],
        input_placeholder_color=soft["light"],
        input_placeholder_color_dark=soft["dark"],
        color_accent="*primary_700",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        link_text_color="*primary_700",
        link_text_color_dark="*primary_300",
    )
