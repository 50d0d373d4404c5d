"""One self-contained HTML page with figures: no script, no request; light and dark, phone and paper."""

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATE = Path(__file__).with_name("page.html")
PAGE_CSS = Path(__file__).with_name("page.css")  # the look of all pages of tokamix
DPI = 170  # of photos
WIDE = 2.2  # figures with a larger aspect ratio scroll on a phone instead of shrinking


class Section(NamedTuple):
    """A figure of the page.

    Attributes:
        title: the heading.
        text: one or two sentences.
        link: address of the paper, or "".
        source: the text of the link.
        light: the figure on a light page.
        dark: the figure on a dark page.
    """

    title: str
    text: str
    link: str
    source: str
    light: "Figure"
    dark: "Figure"


def render_page(title: str, lead: str, facts: Mapping[str, str], sections: Sequence[Section], command: str) -> str:
    """Create the page.

    Args:
        title: the heading.
        lead: the first paragraph.
        facts: short texts by their names, shown in a row.
        sections: figures in order.
        command: how the page was made.
    """
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        base=PAGE_CSS.read_text(encoding="utf-8"),
        title=escape(title),
        lead=escape(lead),
        facts="".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items()),
        sections="".join(map(_section, sections)),
        command=escape(command),
    )


def _section(section: Section) -> str:
    link = f' <a href="{escape(section.link)}">{escape(section.source)}</a>' if section.link else ""
    width, height = section.light.get_size_inches()
    css_class = "figure wide" if width > WIDE * height else "figure"
    dark = f'<source media="(prefers-color-scheme: dark)" srcset="{_address(section.dark)}">'
    picture = f'<picture>{dark}<img src="{_address(section.light)}" alt="{escape(section.text)}"></picture>'
    text = f"<h2>{escape(section.title)}</h2><p>{escape(section.text)}{link}</p>"
    return f'<section>{text}<figure class="{css_class}" tabindex="0">{picture}</figure></section>\n'


def _address(figure: "Figure") -> str:
    """A figure as the address of an image inside the page: SVG, or WebP if it has photos, which is far smaller."""
    file = io.BytesIO()
    options: dict[str, Any] = {"bbox_inches": "tight", "pad_inches": 0.02}
    if not any(axis.images for axis in figure.axes):
        figure.savefig(file, format="svg", metadata={"Date": None}, **options)
        return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()
    figure.savefig(file, format="png", dpi=DPI, **options)
    small = io.BytesIO()
    Image.open(file).convert("RGB").save(small, "WEBP", quality=88)
    return "data:image/webp;base64," + base64.b64encode(small.getvalue()).decode()
