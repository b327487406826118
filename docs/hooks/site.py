"""What `mkdocs build` does besides rendering Markdown.

Equations become MathML, the command reference is generated from the commands, and the reports of
studies and the other files of results/ that pages link to are copied into the site.
"""

import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml import converter
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
COMMANDS = "<!-- commands -->"
STUDIES = "<!-- studies -->"
_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', flags=re.DOTALL)
_DISPLAYED = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', flags=re.DOTALL)
_RESULT = re.compile(r"\]\(\.\./(results/[^)#]+)")


def on_files(files: Files, config: Any) -> Files:
    wanted = {
        found
        for page in (ROOT / "docs").glob("*.md")
        for found in _RESULT.findall(page.read_text(encoding="utf-8"))
    }
    for report in (ROOT / "results/studies").glob("*/*/report.html"):
        page = [report, report.parent / "numbers.json", *report.parent.glob("figures/*")]
        wanted |= {path.relative_to(ROOT).as_posix() for path in page}
    for name in sorted(wanted):
        if (ROOT / name).is_file():
            files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    markdown = _RESULT.sub(r"](\1", markdown)
    if page.file.src_uri == "commands.md":
        if COMMANDS not in markdown:
            raise ValueError(f"docs/commands.md lacks the line {COMMANDS}")
        markdown = markdown.replace(COMMANDS, command_reference())
    if page.file.src_uri == "results.md":
        markdown = markdown.replace(STUDIES, study_reports())
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Equations as MathML, which browsers draw by themselves: no script, no network."""

    def draw(display: str) -> Callable[[re.Match[str]], str]:
        return lambda found: converter.convert(unescape(found[1]).strip(), display=display)

    html = _INLINE.sub(draw("inline"), html)
    return _DISPLAYED.sub(draw("block"), html)


def study_reports() -> str:
    """A link to the page of every study whose results are in results/studies."""
    lines = []
    for report in sorted((ROOT / "results/studies").glob("*/*/report.html")):
        title = re.search(r"<title>(.*?)</title>", report.read_text(encoding="utf-8"))
        link = report.relative_to(ROOT).as_posix()
        lines.append(f"* [{title[1] if title else report.parent}]({link})")
    return "\n".join(lines) or "No study's results are here yet."


def command_reference() -> str:
    """Every command: what it does, examples, and what its --help prints."""
    from agalite import cli
    from agalite.cli import COMMANDS

    parts = []
    for name, command in cli.all_commands(COMMANDS, ["agalite"]):
        words = ["tmaze"] if name == "agalite train" else []
        examples = "\n".join(cli.EXAMPLES.get(name, (name,)))
        parts.append(
            f"## {name}\n\n{cli.summary(command)}\n\n"
            f"```sh\n{examples}\n```\n\n"
            f"```text\n{cli.help_text(command, name, *words)}\n```\n"
        )
    return "\n".join(parts)
