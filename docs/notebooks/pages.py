"""A page of the site for each notebook, with the outputs that it stores: a hook of mkdocs.yml."""

import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

TEMPLATE = """{% extends 'markdown/index.md.j2' %}
{%- block stream %}
```{ .text .no-copy title="Output" }
{{ output.text | strip_ansi | trim }}
```
{% endblock stream %}
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages; the notebooks stay, so that readers can download them."""
    exporter = MarkdownExporter(raw_template=TEMPLATE)
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            text, _ = exporter.from_filename(str(file.abs_src_path))
            text += f"\n[This page as a notebook]({file.name}.ipynb)\n"
            files.append(File.generated(config, page_of(file.src_uri), content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to notebooks lead to their pages."""
    if page.file.src_uri.startswith("notebooks/"):
        return markdown
    return re.sub(r"(?<=\]\()[^)\s]+\.ipynb(?=\))", lambda link: page_of(link[0]), markdown)


def page_of(notebook: str) -> str:
    return notebook.removesuffix(".ipynb") + ".md"
