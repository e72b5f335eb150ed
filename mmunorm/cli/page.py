"""HTML reports in one file that opens from disk: `page.html.jinja` is the base of their templates."""
from __future__ import annotations

from pathlib import Path

import jinja2


def render_page(template: Path, title: str, **values) -> str:
    """Renders a template that extends `page.html.jinja`; text is escaped."""
    loader = jinja2.FileSystemLoader([template.parent, Path(__file__).parent])
    return jinja2.Environment(loader=loader, autoescape=True).get_template(template.name).render(title=title, **values)
