"""A page in a real browser: Debian's chromium, spoken to over a pipe (the DevTools protocol).

with open_page(path_or_address) as page:
    page.evaluate("document.title")
    page.console_errors, page.requests, page.dom
    page.screenshot(tmp_path / "page.png")

Tests that need it take the `chromium` mark below, which skips them where there is none.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)
chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
_PATIENCE = 60.0  # seconds for an answer, on a busy machine


class Page:
    """An open page. `console_errors` and `requests` grow while it is used."""

    def __init__(self, process: subprocess.Popen, to: int, answers: int) -> None:
        self._process, self._to, self._from = process, to, answers
        self._buffer = b""
        self._count = 0
        self._events: list[str] = []
        self._session: str | None = None
        self.console_errors: list[str] = []
        self.requests: list[str] = []
        """Everything that was fetched, the page itself first."""

    def evaluate(self, js: str) -> Any:
        """The value of an expression (a promise is waited for), as JSON can hold it."""
        said = self._call("Runtime.evaluate", expression=js, returnByValue=True, awaitPromise=True)
        if problem := said.get("exceptionDetails"):
            raise AssertionError(f"{js}: {_words(problem)}")
        return said["result"].get("value")

    @property
    def dom(self) -> str:
        """The document as it is now, after its scripts have run."""
        return self.evaluate("document.documentElement.outerHTML")

    def wait(self, js: str, seconds: float = 30.0) -> Any:
        """Until the expression is true; its value."""
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(js)):
            assert time.monotonic() < deadline, f"{js} did not become true in {seconds} s"
            time.sleep(0.05)
        return value

    def screenshot(self, path: str | os.PathLike[str], *, whole: bool = True) -> None:
        """A PNG file: of the whole page, or of what the window shows."""
        said = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        Path(path).write_bytes(base64.b64decode(said["data"]))

    def open(self, address: str) -> None:
        for part in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{part}.enable")
        self._events.clear()
        said = self._call("Page.navigate", url=address)
        assert "errorText" not in said, f"{address}: {said['errorText']}"
        deadline = time.monotonic() + _PATIENCE
        while "Page.loadEventFired" not in self._events:
            self._receive(deadline)

    def attach(self) -> None:
        """To the window that the browser opened by itself."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            targets = self._call("Target.getTargets")["targetInfos"]
            if pages := [t for t in targets if t["type"] == "page"]:
                break
            assert time.monotonic() < deadline, "chromium opened no window"
            time.sleep(0.05)
        target = pages[0]["targetId"]
        said = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = said["sessionId"]

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        number = self._count
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        deadline = time.monotonic() + _PATIENCE
        while True:
            said = self._receive(deadline)
            if said.get("id") == number:
                assert "error" not in said, f"{method}: {said.get('error')}"
                return said["result"]

    def _receive(self, deadline: float) -> dict[str, Any]:
        """The next message; what it says of errors and requests is noted."""
        while b"\0" not in self._buffer:
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._from], [], [], left)
            assert ready, f"chromium has not answered for {_PATIENCE:.0f} s"
            data = os.read(self._from, 2**20)
            assert data, f"chromium has ended with code {self._process.wait()}"
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\0", 1)
        said = json.loads(line)
        method, what = said.get("method", ""), said.get("params", {})
        self._events.append(method)
        if method == "Runtime.exceptionThrown":
            self.console_errors.append(_words(what["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and what["type"] in ("error", "assert"):
            words = [str(x.get("value", x.get("description", ""))) for x in what["args"]]
            self.console_errors.append(" ".join(words))
        elif method == "Log.entryAdded" and what["entry"]["level"] == "error":
            entry = what["entry"]
            self.console_errors.append(f"{entry['text']} {entry.get('url', '')}".strip())
        elif method == "Network.requestWillBeSent":
            address = what["request"]["url"]
            # A picture inside the page is asked for too, from the page.
            self.requests += [] if address.startswith("data:") else [address]
        return said


@contextmanager
def open_page(page: str | os.PathLike[str], *, width: int = 1200) -> Iterator[Page]:
    """A file, or an address like http://localhost:8000/, loaded to the end."""
    assert CHROMIUM is not None
    text = os.fspath(page)
    address = text if "://" in text else Path(text).resolve().as_uri()
    ours, theirs = os.pipe(), os.pipe()  # what we say, what it says
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        command = [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-extensions",
            f"--user-data-dir={profile}",
            f"--window-size={width},900",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        # The pipe is on 3 and 4 by agreement; a shell puts it there, from well out of their way.
        hears, says = (fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (ours[0], theirs[1]))
        script = f'exec "$@" 3<&{hears} 4>&{says}'
        process = subprocess.Popen(
            ["/bin/bash", "-c", script, "bash", *command],
            pass_fds=(hears, says),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": profile},
        )
        for end in (hears, says, ours[0], theirs[1]):
            os.close(end)
        try:
            made = Page(process, ours[1], theirs[0])
            made.attach()
            made.open(address)
            yield made
        finally:
            os.close(ours[1])  # it ends when nobody speaks to it any more
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(theirs[0])


def _words(details: dict[str, Any]) -> str:
    exception = details.get("exception", {})
    return exception.get("description") or details.get("text", "an exception")
