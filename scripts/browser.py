"""Headless Chromium, driven through its debugging pipe. scripts/test-pages opens pages with it."""

import base64
import json
import os
import select
import shutil
import struct
import subprocess
import tempfile
import time
import zlib

FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe""".split()


def find():
    """The path of Chromium, which is installed if missing; None if that is not possible."""
    names = ["chromium", "chromium-browser", "google-chrome"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found or not shutil.which("apt-get"):
        return found
    print("installing chromium", flush=True)
    root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"]
    for command in (["apt-get", "update", "-qq"], install):
        try:
            done = subprocess.run(root + command, env=environment, stdout=subprocess.DEVNULL)
        except OSError:
            return None
        if done.returncode != 0:
            return None
    return shutil.which("chromium")


class Browser:
    """A browser with a temporary profile, and one open page at a time."""

    def __init__(self, path):
        self.folder = tempfile.TemporaryDirectory(prefix="pages-", ignore_cleanup_errors=True)
        to_child, self.write = os.pipe()
        self.read, from_child = os.pipe()
        # Chromium reads its commands from file descriptor 3 and answers on 4.
        line = f'exec "$@" 3<&{to_child} 4>&{from_child}'
        command = ["bash", "-c", line, "chromium", path, *FLAGS, f"--user-data-dir={self.folder.name}", "about:blank"]
        self.process = subprocess.Popen(
            command, pass_fds=[to_child, from_child], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_child)
        os.close(from_child)
        self.buffer, self.last, self.events, self.session = b"", 0, [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.write)  # ends the browser
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.read)
        self.folder.cleanup()

    def message(self, until):
        """Returns the browser's next message."""
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read], [], [], max(0, until - time.monotonic()))
            chunk = os.read(self.read, 1 << 20) if ready else b""
            if not chunk:
                raise RuntimeError("the browser does not answer" if not ready else "the browser has ended")
            self.buffer += chunk
        text, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(text)

    def call(self, method, **params):
        """Sends a protocol command and returns its result; events that arrive meanwhile are appended to `events`."""
        self.last += 1
        command = {"id": self.last, "method": method, "params": params}
        if self.session:
            command["sessionId"] = self.session
        data = json.dumps(command).encode() + b"\0"
        while data:
            data = data[os.write(self.write, data) :]
        until = time.monotonic() + 120
        while True:
            message = self.message(until)
            if message.get("id") == self.last:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]
            self.events.append(message)

    def open(self, page, width=1280, height=800, dark=False, ratio=1):
        """Opens a file and returns the milliseconds from navigation to the first drawing, by the page's clock."""
        self.events.clear()
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        metrics = dict(width=width, height=height, deviceScaleFactor=ratio, mobile=False)
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        self.call("Page.navigate", url=f"file://{os.path.abspath(page)}")
        return float(self.wait("document.documentElement?.dataset.drawn"))

    def wait(self, expression, seconds=60):
        """Waits until an expression is true and returns its value."""
        until = time.monotonic() + seconds
        while True:
            value = self.value(expression)
            if value or time.monotonic() > until:
                assert value, f"{expression} is {value!r} after {seconds} s; {self.faults()}"
                return value
            time.sleep(0.02)

    def value(self, expression):
        """Evaluates an expression in the page's script."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def settle(self):
        """Waits until pending changes are drawn."""
        self.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))")

    def mouse(self, kind, x, y, **more):
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def hover(self, x, y):
        self.mouse("mouseMoved", x, y)
        self.settle()

    def click(self, x, y):
        self.mouse("mouseMoved", x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)
        self.settle()

    def drag(self, x, y, to_x, to_y):
        self.mouse("mousePressed", x, y, button="left", clickCount=1)
        for part in (0.5, 1):
            self.mouse("mouseMoved", x + part * (to_x - x), y + part * (to_y - y), button="left", buttons=1)
        self.mouse("mouseReleased", to_x, to_y, button="left", clickCount=1)
        self.settle()

    def wheel(self, x, y, by, shift=False):
        self.mouse("mouseWheel", x, y, deltaX=0, deltaY=by, modifiers=8 if shift else 0)
        self.settle()

    def key(self, key):
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **(text if kind == "keyDown" else {}))
        self.settle()

    def type(self, text):
        self.call("Input.insertText", text=text)

    def box(self, selector):
        """The position of an element in the window: x, y, width, height."""
        found = f"(({{x, y, width, height}}) => [x, y, width, height])(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        return self.value(found)

    def text(self, selector):
        return self.value(f"document.querySelector({json.dumps(selector)}).innerText")

    def screenshot(self, scale=1):
        """A PNG of the window."""
        self.settle()
        width, height = self.value("[innerWidth, innerHeight]")
        clip = dict(x=0, y=0, width=width, height=height, scale=scale)
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", clip=clip)["data"])

    def faults(self):
        """The faults since the page was opened: exceptions, console errors and network requests."""
        self.value("0")
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"].get("exception", {}).get("description", "exception"))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(f"console: {params['args']}")
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(f"log: {params['entry']['text']}")
            elif method == "Network.requestWillBeSent":
                if params.get("type") != "Document" and not params["request"]["url"].startswith("data:"):
                    found.append(f"request: {params['request']['url']}")
        return found


def pixels(png):
    """Width, height, number of channels (3 or 4) and the rows of a PNG as bytes."""
    at, data = 8, b""
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        chunk = png[at + 8 : at + 8 + length]
        at += 12 + length
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack(">IIBB", chunk[:10])
            assert depth == 8 and colour in (2, 6), "a screenshot is RGB or RGBA"
        elif kind == b"IDAT":
            data += chunk
    channels = 3 if colour == 2 else 4
    raw, rows, before = zlib.decompress(data), [], bytearray(width * channels)
    for y in range(height):
        line = y * (width * channels + 1)
        rows.append(before := unfiltered(raw[line], bytearray(raw[line + 1 : line + 1 + width * channels]), before, channels))
    return width, height, channels, rows


def unfiltered(kind, row, above, channels):
    """Undoes the filter of a PNG row."""
    for i in range(len(row) if kind else 0):
        left = row[i - channels] if i >= channels else 0
        up = above[i]
        if kind == 1:
            row[i] = (row[i] + left) & 255
        elif kind == 2:
            row[i] = (row[i] + up) & 255
        elif kind == 3:
            row[i] = (row[i] + (left + up) // 2) & 255
        else:
            corner = above[i - channels] if i >= channels else 0
            guess = left + up - corner
            a, b, c = abs(guess - left), abs(guess - up), abs(guess - corner)
            row[i] = (row[i] + (left if a <= b and a <= c else up if b <= c else corner)) & 255
    return row


def colours(png):
    """The number of colours that at least 100 pixels have."""
    _, _, channels, rows = pixels(png)
    seen = {}
    for row in rows:
        for i in range(0, len(row), channels):
            pixel = bytes(row[i : i + 3])
            seen[pixel] = seen.get(pixel, 0) + 1
    return sum(1 for n in seen.values() if n >= 100)


def difference(one, other):
    """The fraction of pixels that differ between two screenshots of the same size."""
    (width, height, channels, a), (*_, b) = pixels(one), pixels(other)
    differing = sum(
        p[i : i + channels] != q[i : i + channels] for p, q in zip(a, b) for i in range(0, len(p), channels)
    )
    return differing / (width * height)
