"""Drives headless Chromium over a pipe, with its DevTools protocol: pages that change by themselves can be tried step by step.

Needs the standard library only.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]


def find():
    """The path of an installed browser, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


class Page:
    """A browser with one page, which is closed at the end of a `with` block."""

    def __init__(self, browser, width, height):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        # The browser reads messages from descriptor 3 and writes to 4, each with a zero byte at its end.
        read_there, self.write = os.pipe()
        self.read, write_there = os.pipe()

        def place():
            # Neither may be in the way of the other.
            there = [os.dup(read_there), os.dup(write_there)]
            os.dup2(there[0], 3)
            os.dup2(there[1], 4)

        self.process = subprocess.Popen(
            [browser, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={self.profile.name}", "about:blank"],
            preexec_fn=place, close_fds=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        os.close(read_there)
        os.close(write_there)
        self.buffer, self.last, self.session, self.console = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()
        os.close(self.write)
        os.close(self.read)
        self.profile.cleanup()

    def receive(self, seconds=60):
        """The next message of the browser; those of the console are kept."""
        until = time.monotonic() + seconds
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read], [], [], max(0, until - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            self.buffer += os.read(self.read, 1 << 20)
        message, self.buffer = self.buffer.split(b"\0", 1)
        message = json.loads(message)
        if message.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.console.append(json.dumps(message["params"])[:500])
        return message

    def call(self, method, **params):
        """Calls a method of the protocol, and returns its result."""
        self.last += 1
        request = {"id": self.last, "method": method, "params": params}
        if self.session:
            request["sessionId"] = self.session
        os.write(self.write, json.dumps(request).encode() + b"\0")
        while True:
            message = self.receive()
            if message.get("id") == self.last:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]

    def resize(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script):
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait(self, script, seconds=30):
        """Whether an expression becomes true."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.run(script):
                return True
            time.sleep(0.1)
        return False

    def screenshot(self):
        """The page as it is seen, as bytes of a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
