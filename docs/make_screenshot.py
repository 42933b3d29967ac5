"""Takes a picture of TensorBoard's first page of one run, as it opens, or of the charts that are named.

    python docs/make_screenshot.py runs/quickstart docs/tensorboard.png

It needs tensorboard and chromium (``apt-get install chromium``). It drives the browser through its debugging
pipe, because ``--screenshot`` cannot wait until the last chart is drawn.
"""

import argparse
import base64
import contextlib
import itertools
import json
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FIRST_CARDS = 4
"""Number of charts that must be drawn before the first page is taken."""

TIMEOUT_S = 60.0
"""Longest wait for TensorBoard's server, for a reply of the browser, and for the charts."""

BROWSER_FLAGS = (
    "--headless",
    "--no-sandbox",  # a container has no user namespaces, and only our own page is opened
    "--disable-gpu",
    "--disable-3d-apis",  # without WebGL, TensorBoard draws lines as SVG, which can be queried
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)

PAGE_SETTINGS = {
    "timeSeriesSettingsPaneOpened": False,
    "stepSelectorEnabled": False,
    "sideBarWidthInPercent": 14,
    "ignoreOutliers": False,
}
"""Settings that TensorBoard keeps in the browser's local storage."""

DRAWN_CARDS = (
    "[...document.querySelectorAll('card-view')].filter(card => card.querySelector('svg path[d]')).length"
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Take a picture of TensorBoard's page of one run.")
    parser.add_argument("run", type=Path, help="folder of the run, with its event files")
    parser.add_argument("png", type=Path, help="picture to write")
    parser.add_argument("--tags", nargs="+", default=[], help="charts to show; default: no filter")
    parser.add_argument("--size", type=int, nargs=2, default=(1240, 840), metavar=("WIDTH", "HEIGHT"))
    parser.add_argument(
        "--scale", type=float, default=1.5, help="pixels of the picture per pixel of the page"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        logs = copy_events(options.run, Path(scratch, "logs"))
        with tensorboard(logs) as origin, Browser(Path(scratch, "browser")) as browser:
            picture = draw(browser, origin, options.tags, options.size, options.scale)
    options.png.write_bytes(picture)
    print(f"{options.png}: {len(picture)} bytes")


def copy_events(run: Path, logs: Path) -> Path:
    """Make a log folder in which this run is the only run and has a name."""
    events = sorted(run.glob("events.out.tfevents.*"))
    if not events:
        sys.exit(f"{run} holds no events.out.tfevents.* file; pass the folder of a run")
    target = logs / run.resolve().name
    target.mkdir(parents=True)
    for path in events:
        shutil.copy(path, target)
    return logs


@contextlib.contextmanager
def tensorboard(logs: Path) -> Iterator[str]:
    """Start a TensorBoard server on a free local port, and yield its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    origin = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logs), "--host", "127.0.0.1"]
    server = subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.DEVNULL)

    def has_runs() -> bool:
        if server.poll() is not None:
            sys.exit(
                f"tensorboard exited with status {server.returncode}; run it by hand: {' '.join(command)}"
            )
        try:
            with urllib.request.urlopen(f"{origin}/data/runs", timeout=TIMEOUT_S) as reply:
                return bool(json.load(reply))
        except urllib.error.URLError:
            return False

    try:
        wait_for(has_runs, "TensorBoard to read the run")
        yield origin
    finally:
        server.terminate()
        server.wait()


class Browser:
    """Headless chromium with one page, controlled by the DevTools protocol over two pipes."""

    def __init__(self, profile: Path) -> None:
        program = (
            shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        )
        if program is None:
            sys.exit("no chromium found; apt-get install chromium")
        read_end, self._out = os.pipe()
        self._in, write_end = os.pipe()
        # The browser reads commands from descriptor 3 and replies on 4; the shell puts the pipes there.
        script = f'exec 8<&{read_end} 9>&{write_end}; exec 3<&8 4>&9 8<&- 9>&-; exec "$@"'
        flags = [*BROWSER_FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", program, *flags],
            pass_fds=(read_end, write_end),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_end)
        os.close(write_end)
        self._ids = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """Send one command and return its result."""
        number = next(self._ids)
        message: dict[str, object] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive(method)
            if reply.get("id") != number:
                continue
            if "error" in reply:
                raise RuntimeError(f"chromium refused {method}: {reply['error']}")
            return reply["result"]

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def _receive(self, what: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], TIMEOUT_S)[0]:
                raise TimeoutError(f"chromium has not replied to {what} for {TIMEOUT_S:.0f} s")
            chunk = os.read(self._in, 1 << 20)
            if not chunk:
                raise ConnectionError(f"chromium exited during {what}")
            self._rest += chunk
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


def draw(browser: Browser, origin: str, tags: list[str], size: tuple[int, int], scale: float) -> bytes:
    """Return a PNG of TensorBoard's time-series page with the charts of `tags`."""
    width, height = size
    browser.call(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=height,
        deviceScaleFactor=scale,
        mobile=False,
    )
    browser.call("Page.enable")
    settings = json.dumps(json.dumps(PAGE_SETTINGS))
    browser.call(
        "Page.addScriptToEvaluateOnNewDocument",
        source=f"if (location.origin !== 'null') localStorage.setItem('_tb_global_settings', {settings})",
    )
    pattern = "|".join(re.escape(tag) for tag in tags)
    query = urllib.parse.urlencode({"smoothing": 0} | ({"tagFilter": pattern} if tags else {}))
    browser.call("Page.navigate", url=f"{origin}/?{query}#timeseries")
    expected = len(tags) or FIRST_CARDS
    wait_for(lambda: browser.evaluate(DRAWN_CARDS) >= expected, f"{expected} charts")
    time.sleep(2)  # the axes still move into place
    return base64.b64decode(browser.call("Page.captureScreenshot", format="png")["data"])


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Poll `condition` until it holds."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {TIMEOUT_S:.0f} s for {what}")
        time.sleep(0.2)


if __name__ == "__main__":
    main()
