"""Docstrings on the API page: Markdown in Equinox's form, shown as it is.

Two things in them would be misread: `<env>` as a tag of HTML, and `a*b` as the start of emphasis.
"""

import re
from typing import Any

from griffe import Extension, Object

_CODE = re.compile(r"(`+[^`]*`+)")


class Prose(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = prose(obj.docstring.value)


def prose(text: str) -> str:
    """The docstring as Markdown; indented code and code in backticks are left as they are."""
    return "\n\n".join(_paragraph(part) for part in text.split("\n\n"))


def _paragraph(text: str) -> str:
    if text.startswith("    "):
        return text
    parts = _CODE.split(text)
    parts[::2] = [
        re.sub(r"(?<=\w)\*(?=\w)", r"\\*", part.replace("<", "&lt;")) for part in parts[::2]
    ]
    return "".join(parts)
