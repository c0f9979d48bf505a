"""Pages of HTML, filled by Jinja2: each is one file that needs no script, no other file and no network.

A template, NAME.html.j2, lies beside the module that fills it and extends display/page.html.j2, which has the style.
Jinja2 escapes every value, because configs, samples, paths and errors come from outside.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from training.records.record import write_atomically

TEMPLATES = Path(__file__).parents[1]  # tasks/: a template is named PACKAGE/NAME.html.j2


def write_html(path: Path, template: str, **values: Any) -> None:
    """Fill tasks/`template` with `values`; a missing value raises an error."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["png_data_uri"] = png_data_uri
    write_atomically(path, environment.get_template(template).render(**values))


def png_data_uri(path: Path) -> str:
    """The picture's bytes as a `data:` URL, so that the page stays one file."""
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
