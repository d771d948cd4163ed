"""Reports of a training record, from the record alone: HTML, Markdown, and plain data for JSON.

``run = load(directory)`` gathers a record once, in bounded memory; everything else turns that into
text: :func:`html` (engineers), :func:`summary` (one page for others), :func:`markdown`,
:func:`summary_markdown` and :func:`to_dict`. Each name is loaded at its first use: a command that
only prints events needs neither charts nor the verifier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cirron_otel.training_record.report.engineers import html
    from cirron_otel.training_record.report.facts import to_dict
    from cirron_otel.training_record.report.gather import load
    from cirron_otel.training_record.report.markdown_text import markdown, summary_markdown
    from cirron_otel.training_record.report.model import Run
    from cirron_otel.training_record.report.one_page import summary

__all__ = ["Run", "html", "load", "markdown", "summary", "summary_markdown", "to_dict"]

_HOMES = {
    "Run": "model",
    "html": "engineers",
    "load": "gather",
    "markdown": "markdown_text",
    "summary": "one_page",
    "summary_markdown": "markdown_text",
    "to_dict": "facts",
}


def __getattr__(name: str) -> object:
    """Load a name at its first use; from then on it is an ordinary attribute."""
    from importlib import import_module  # noqa: PLC0415 - only for names not loaded yet

    if name not in _HOMES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    found: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found
