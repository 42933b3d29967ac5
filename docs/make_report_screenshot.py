"""Takes a picture of a page of ``slipstream report`` or of the site, and says what a reader stumbles over.

    python docs/make_report_screenshot.py runs/quickstart/report.html docs/report.png --width 1280
    python docs/make_report_screenshot.py build/site/index.html build/site.png --height 1000 --settle 1

It needs chromium, and prints errors of the page's script and whether anything is wider than the page.
"""

import argparse
import base64
import tempfile
import time
from pathlib import Path

from make_screenshot import Browser, wait_for

FACTS = (
    "JSON.stringify({errors: window.errors, wide: document.documentElement.scrollWidth - innerWidth, "
    "height: document.documentElement.scrollHeight})"
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Take a picture of a page of slipstream report.")
    parser.add_argument("page", type=Path)
    parser.add_argument("png", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=0, help="0: the whole page")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--from", dest="anchor", default="", help="id of the section to begin at")
    parser.add_argument("--run", default="", help="JavaScript to run before the picture")
    parser.add_argument("--settle", type=float, default=0.3, help="seconds until the page stands still")
    options = parser.parse_args()
    scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # the browser ends a moment later
    with scratch as profile, Browser(Path(profile)) as browser:
        browser.call("Page.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if options.dark else "light"}
        browser.call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"deviceScaleFactor": options.scale, "mobile": options.width < 500}
        screen = {"width": options.width, "height": options.height or 900}
        browser.call("Emulation.setDeviceMetricsOverride", **screen, **size)
        browser.call(
            "Page.addScriptToEvaluateOnNewDocument",
            source="window.errors = []; addEventListener('error', (e) => errors.push(e.message))",
        )
        browser.call("Page.navigate", url=options.page.resolve().as_uri())
        wait_for(lambda: browser.evaluate("document.readyState") == "complete", "the page")
        if options.run:
            browser.evaluate(options.run)
        time.sleep(options.settle)
        print(options.page, options.width, browser.evaluate(FACTS))
        top = 0
        if options.anchor:
            top = browser.evaluate(
                f"document.getElementById('{options.anchor}').getBoundingClientRect().top + scrollY"
            )
        height = options.height or browser.evaluate("document.documentElement.scrollHeight") - top
        clip = {"x": 0, "y": top, "width": options.width, "height": height, "scale": 1}
        beyond = not options.height or bool(options.anchor)
        picture = browser.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=beyond, clip=clip
        )
        options.png.write_bytes(base64.b64decode(picture["data"]))


if __name__ == "__main__":
    main()
