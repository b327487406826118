"""Our docstrings are prose; on the page of the API they are shown as such, and as nothing else.

`<env>` is not a tag of HTML, and where a line or sentence begins with `name:` it describes an
argument: an item of a list there.
"""

import re
from typing import Any

from griffe import Extension, Object

_CODE = re.compile(r"(`[^`]*`)")
_ARGUMENT = re.compile(r"(?:^|(?<=\.) )([a-z_]+(?:, [a-z_]+)*): ", flags=re.MULTILINE)


class Prose(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = prose(obj.docstring.value)


def prose(text: str) -> str:
    return "\n\n".join(_paragraph(part) for part in text.split("\n\n"))


def _paragraph(text: str) -> str:
    if text.startswith("    "):  # code, or a table of shapes: left as it is
        return text
    parts = _CODE.split(text)
    parts[::2] = [part.replace("<", "&lt;").replace("*", r"\*") for part in parts[::2]]
    text = "".join(parts)
    if _ARGUMENT.match(text):
        return _ARGUMENT.sub(r"\n* **\1**: ", text).strip()
    return text
