"""Headless Chromium over its debugging pipe, by the standard library alone."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


# Puts the pipe's ends where Chromium expects them, and becomes Chromium.
_START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for end, place in zip(ends, (3, 4)):
    os.dup2(end, place)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One page of a browser: opens files, evaluates expressions, keeps errors and requests."""

    def __init__(self, executable: str, profile: str) -> None:
        read_ours, write_theirs = os.pipe()
        read_theirs, write_ours = os.pipe()
        self._send, self._receive = write_ours, os.fdopen(read_ours, "rb")
        flags = "--headless --no-sandbox --disable-gpu --remote-debugging-pipe --no-first-run --disable-dev-shm-usage"
        arguments = [executable, *flags.split(), f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, str(read_theirs), str(write_theirs), *arguments],
            pass_fds=(read_theirs, write_theirs),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_theirs)
        os.close(write_theirs)
        self._id = 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._id += 1
        message: dict[str, Any] = {"id": self._id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._send, data) :]
        while True:
            answer = self._next()
            if answer.get("id") == self._id:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        parts = bytearray()
        while (byte := self._receive.read(1)) != b"\0":
            if not byte:
                raise AssertionError("The browser ended.")
            parts += byte
        message = json.loads(parts)
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:500])
        elif message.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(params["args"])[:500])
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        return message

    def open(
        self, path: pathlib.Path, *, width: int = 1280, height: int = 900, dark: bool = False, at: str = ""
    ) -> float:
        """Load a file; seconds until it is complete."""
        self.errors.clear()
        self.requests.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url="about:blank")
        self.call("Storage.clearDataForOrigin", origin="file://", storageTypes="local_storage")
        start = time.perf_counter()
        self.call("Page.navigate", url=path.as_uri() + (f"#{at}" if at else ""))
        while not self.js("document.readyState === 'complete' && location.protocol === 'file:'"):
            time.sleep(0.01)
        return time.perf_counter() - start

    def js(self, expression: str) -> Any:
        """The value of an expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise AssertionError(json.dumps(result["exceptionDetails"])[:600])
        return result["result"].get("value")

    def key(self, key: str) -> None:
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        for kind in ("keyDown", "keyUp"):
            extra = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **extra)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """A real click into the middle of an element's upper end."""
        x, y = self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: e.getBoundingClientRect().height > innerHeight / 3 ? 'start' : 'center'});"
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + Math.min(r.height / 2, 10)]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def ready(self, path: pathlib.Path, **how: Any) -> None:
        """Open a page and wait until its script has drawn it."""
        self.open(path, **how)
        self.until("document.documentElement.dataset.ready")

    def until(self, condition: str) -> None:
        for _ in range(3000):
            if self.js(condition):
                return
            time.sleep(0.01)
        raise AssertionError(f"{condition} does not come true: {self.errors}")

    def check(self, path: pathlib.Path) -> None:
        """No error, no request but for the page itself, nothing wider than the window."""
        assert self.errors == []
        wanted = [url for url in self.requests if not url.startswith(("about:", "data:"))]
        assert {url.partition("#")[0] for url in wanted} == {path.as_uri()}
        assert self.js("document.documentElement.scrollWidth <= innerWidth")

    def walk_through(self, path: pathlib.Path, name: str, *, width: int = 1280, dark: bool = False) -> None:
        """What a person does on the page of a pair: search `name`, go to a difference, open and close a fold, change the theme."""
        count = "document.querySelectorAll('g.item').length"
        current = "document.querySelector('.current')"
        self.ready(path, width=width, dark=dark)
        assert 0 < self.js(count) <= 200
        self.js("document.querySelector('.pane').focus()")
        self.key("/")
        self.type(name)
        self.until("document.querySelector('.hits .total') !== null")
        self.key("Enter")
        self.until(f"{current} !== null")
        assert self.js(f"{current}.dataset.id") == name
        assert name in self.js("document.querySelector('.side').innerText")
        assert self.js("decodeURIComponent(location.hash.slice(1))") == name
        self.key("n")
        assert self.js(f"{current}.dataset.id") != name
        assert self.js(f"/added|removed|changed/.test({current}.getAttribute('class'))")
        self.js("[...document.querySelectorAll('.toolbar button')].find((b) => b.textContent == 'Fold').click()")
        shown = self.js(count)
        self.click("g.item.fold:not(.open)")
        assert self.js(count) > shown
        self.click("g.item.fold.open")
        assert self.js(count) == shown
        background = self.js("getComputedStyle(document.body).backgroundColor")
        self.click("#theme")
        assert self.js("getComputedStyle(document.body).backgroundColor") != background
        self.check(path)

    def screenshot(self, path: pathlib.Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        with contextlib.suppress(AssertionError, OSError):
            self._session = None
            self.call("Browser.close")
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._send)
        self._receive.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        made = Browser(CHROMIUM, profile)
        yield made
        made.close()
