"""Chromium without a window, driven by its DevTools protocol over a pair of pipes."""

import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from typing import Any

__all__ = ["CHROMIUM", "Browser"]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
_PATIENCE = 60  # seconds


class Browser:
    """One page of a browser of its own; what it logs and asks for is in `problems` and `requests`.

    Args:
        profile: an empty folder for the browser.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._numbers = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._events: list[dict[str, Any]] = []
        self._received = b""
        theirs_in, self._out = map(_moved, os.pipe())
        self._in, theirs_out = map(_moved, os.pipe())
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                   "--no-first-run", "--remote-debugging-pipe",
                   f"--user-data-dir={profile}"]  # fmt: skip
        log = os.open(profile / "log", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
        self._process = os.posix_spawn(
            CHROMIUM, [CHROMIUM, *options], os.environ, setpgroup=0,
            # The descriptors at which it expects its commands, and answers them.
            file_actions=[(os.POSIX_SPAWN_DUP2, theirs_in, 3), (os.POSIX_SPAWN_DUP2, theirs_out, 4),
                          (os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)],
        )  # fmt: skip
        for descriptor in (theirs_in, theirs_out, log):
            os.close(descriptor)
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask for something by its name in the protocol, and wait for the answer."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        self._wait(lambda: number in self._answers)
        answer = self._answers.pop(number)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def open(self, path: Path, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Show a file in a window of a size; scrollbars are those of a desktop."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
            mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        self.call("Page.navigate", url=path.as_uri())
        self._wait(lambda: any(e["method"] == "Page.loadEventFired" for e in self._events))

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, element: str) -> None:
        """Click with the mouse on what an expression gives."""
        self.run(f"({element}).scrollIntoView({{block: 'center'}})")
        box = f"(({element}).getBoundingClientRect())"
        x, y = self.run(f"[{box}.x + {box}.width / 2, {box}.y + {box}.height / 2]")
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
            )  # fmt: skip

    def press(self, key: str) -> None:
        """Press one of the keys Enter, Escape and Tab."""
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        about = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def close(self) -> None:
        """End the browser."""
        os.close(self._out)
        os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._in)

    def _wait(self, done: Any) -> None:
        end = time.monotonic() + _PATIENCE
        while not done():
            ready, _, _ = select.select([self._in], [], [], max(end - time.monotonic(), 0))
            assert ready, f"the browser said nothing for {_PATIENCE} seconds"
            content = os.read(self._in, 1 << 20)
            assert content, "the browser has ended"
            *whole, self._received = (self._received + content).split(b"\0")
            for message in map(json.loads, whole):
                if "id" in message:
                    self._answers[message["id"]] = message
                else:
                    self._heard(message)

    def _heard(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        method, about = event["method"], event["params"]
        if method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif method == "Runtime.exceptionThrown" or (
            method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning")
        ):
            self.problems.append(json.dumps(about))
        elif method == "Runtime.consoleAPICalled":
            self.problems.append(json.dumps(about["args"]))
        elif method == "Page.javascriptDialogOpening":
            self.problems.append(f"dialog: {about['message']}")


def _moved(descriptor: int) -> int:
    """The same pipe under a number that the browser's own ones do not meet."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved
