"""Drives a headless Chromium over a pipe (the DevTools protocol), to test web pages.

with open_page(path_or_address) as page:
    page.evaluate("document.title")
    page.console_errors, page.requests, page.dom
    page.screenshot(tmp_path / "page.png")

The mark `needs_chromium` skips a test where no Chromium is installed.
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
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium: apt-get install chromium"
)
_TIMEOUT = 60.0  # seconds for an answer, on a busy machine


class Page:
    """An open page. `console_errors` and `requests` grow while it is used."""

    def __init__(self, process: subprocess.Popen, write_end: int, read_end: int) -> None:
        self._process, self._write_end, self._read_end = process, write_end, read_end
        self._buffer = b""
        self._count = 0
        self._events: list[str] = []
        self._session: str | None = None
        self.console_errors: list[str] = []
        self.requests: list[str] = []
        """Everything that was fetched; the page itself is first."""

    def evaluate(self, js: str) -> Any:
        """The value of an expression as JSON holds it; a promise is awaited."""
        answer = self._call(
            "Runtime.evaluate", expression=js, returnByValue=True, awaitPromise=True
        )
        if problem := answer.get("exceptionDetails"):
            raise AssertionError(f"{js}: {_exception_text(problem)}")
        return answer["result"].get("value")

    @property
    def dom(self) -> str:
        """The document after its scripts have run."""
        return self.evaluate("document.documentElement.outerHTML")

    def wait(self, js: str, seconds: float = 30.0) -> Any:
        """Waits until an expression is true and returns its value."""
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(js)):
            assert time.monotonic() < deadline, f"{js} did not become true in {seconds} s"
            time.sleep(0.05)
        return value

    def screenshot(self, path: str | os.PathLike[str], *, whole: bool = True) -> None:
        """Writes a PNG of the whole page, or of what the window shows."""
        answer = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        Path(path).write_bytes(base64.b64decode(answer["data"]))

    def open(self, address: str) -> None:
        for part in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{part}.enable")
        self._events.clear()
        answer = self._call("Page.navigate", url=address)
        assert "errorText" not in answer, f"{address}: {answer['errorText']}"
        deadline = time.monotonic() + _TIMEOUT
        while "Page.loadEventFired" not in self._events:
            self._receive(deadline)

    def attach(self) -> None:
        """Attaches to the window that the browser has opened."""
        deadline = time.monotonic() + _TIMEOUT
        while True:
            targets = self._call("Target.getTargets")["targetInfos"]
            if pages := [t for t in targets if t["type"] == "page"]:
                break
            assert time.monotonic() < deadline, "chromium opened no window"
            time.sleep(0.05)
        target = pages[0]["targetId"]
        answer = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = answer["sessionId"]

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        number = self._count
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write_end, data) :]
        deadline = time.monotonic() + _TIMEOUT
        while True:
            message = self._receive(deadline)
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message.get('error')}"
                return message["result"]

    def _receive(self, deadline: float) -> dict[str, Any]:
        """The next message; errors and requests that it reports are recorded."""
        while b"\0" not in self._buffer:
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._read_end], [], [], left)
            assert ready, f"chromium has not answered for {_TIMEOUT:.0f} s"
            data = os.read(self._read_end, 2**20)
            assert data, f"chromium has ended with code {self._process.wait()}"
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(line)
        method, params = message.get("method", ""), message.get("params", {})
        self._events.append(method)
        if method == "Runtime.exceptionThrown":
            self.console_errors.append(_exception_text(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            words = [str(x.get("value", x.get("description", ""))) for x in params["args"]]
            self.console_errors.append(" ".join(words))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            entry = params["entry"]
            self.console_errors.append(f"{entry['text']} {entry.get('url', '')}".strip())
        elif method == "Network.requestWillBeSent":
            address = params["request"]["url"]
            # An image inside the page is a request too, for its data URL.
            self.requests += [] if address.startswith("data:") else [address]
        return message


@contextmanager
def open_page(page: str | os.PathLike[str], *, width: int = 1200) -> Iterator[Page]:
    """Opens a file, or an address like http://localhost:8000/, and waits until it is loaded."""
    assert CHROMIUM is not None
    text = os.fspath(page)
    address = text if "://" in text else Path(text).resolve().as_uri()
    to_browser, from_browser = os.pipe(), os.pipe()
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
        # Chromium reads from descriptor 3 and writes to 4. A shell puts the pipes there, from
        # descriptors high enough not to collide.
        ends = (to_browser[0], from_browser[1])
        read_end, write_end = (fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in ends)
        script = f'exec "$@" 3<&{read_end} 4>&{write_end}'
        process = subprocess.Popen(
            ["/bin/bash", "-c", script, "bash", *command],
            pass_fds=(read_end, write_end),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": profile},
        )
        for end in (read_end, write_end, *ends):
            os.close(end)
        try:
            opened = Page(process, to_browser[1], from_browser[0])
            opened.attach()
            opened.open(address)
            yield opened
        finally:
            os.close(to_browser[1])  # the browser ends when its pipe is closed
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(from_browser[0])


def _exception_text(details: dict[str, Any]) -> str:
    exception = details.get("exception", {})
    return exception.get("description") or details.get("text", "an exception")
