"""The only addresses that the studio answers, and headers that keep the page on its own server.

Gradio serves much more: a proxy for other addresses, recordings, run histories, an API. The page needs none of it.
"""

import re
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse

from tokamix.studio.settings import is_loopback

ROUTES = re.compile(
    r"/|/(config|login|logout|theme\.css|favicon\.ico|robots\.txt|manifest\.json)/?|/(static|assets|svelte)/[^\0]+"
    r"|/gradio_api/(queue/(join|data)|upload|upload_progress|cancel|reset|login_check|user|token|app_id"
    r"|startup-events|heartbeat/\w+)/?"
    r"|/gradio_api/file=/[^\0]+"  # paths, never addresses; Gradio checks that they are its own temporary files
)
HEADERS = {
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; form-action 'self';"
    " base-uri 'self'; object-src 'none'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class OnlyNeededRoutes:
    """ASGI middleware: 404 for all but `ROUTES`, and `HEADERS` for every answer.

    Args:
        app: the server.
        host: address of the studio. If only this machine reaches it, requests must name this machine, so that no page
            of the internet whose name points to 127.0.0.1 can use the studio.
    """

    def __init__(self, app: Any, host: str) -> None:
        self.app, self.local = app, is_loopback(host)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer = self.app
        if not ROUTES.fullmatch(scope["path"]) or ".." in scope["path"].split("/"):
            answer = PlainTextResponse("the studio has no such page", 404)
        elif self.local and not is_loopback(_host_name(Headers(scope=scope).get("host", ""))):
            answer = PlainTextResponse("this studio answers this machine only", 400)
        await answer(scope, receive, send_with_headers)


def only_needed_routes(host: str) -> Middleware:
    """The middleware for `app_kwargs` of Gradio's `launch`."""
    return Middleware(OnlyNeededRoutes, host=host)


def _host_name(header: str) -> str:
    """The host of a Host header without its port: "localhost:7860", "[::1]:7860"."""
    return header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]
