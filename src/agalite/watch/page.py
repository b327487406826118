"""The story as a web page: one file, nothing fetched, for any browser."""

import json
from importlib import resources
from typing import Any


def page(story: dict[str, Any]) -> str:
    here = resources.files("agalite.watch")
    text = {name: (here / f"page.{name}").read_text("utf-8") for name in ("html", "css", "js")}
    # "</script>" inside the data would end it.
    data = json.dumps(story, allow_nan=False, separators=(",", ":")).replace("</", "<\\/")
    whole = text["html"]
    for mark, part in (("CSS", text["css"]), ("JS", text["js"]), ("DATA", data)):
        whole = whole.replace(f"<!--{mark}-->", part)
    return whole
