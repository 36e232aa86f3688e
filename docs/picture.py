"""Writes the console's picture, of the demo at work: ``make picture``.  It needs Chromium and its driver."""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from selenium import webdriver

PICTURE = Path(__file__).parent / "pictures" / "console.png"
WIDTH, HEIGHT = 1280, 720
TRAFFIC_S = 40
LINK = re.compile(r"http://127\.0\.0\.1:\d+/\S+")


def main() -> None:
    """Take the picture when the demo's last consumer has begun, halfway through its traffic."""
    demo = subprocess.Popen(  # noqa: S603 - nothing of it comes from outside
        [sys.executable, "-m", "penstock", "demo", "--console", "--engine", "inline", f"--duration={TRAFFIC_S}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert demo.stdout
        link = next(found[0] for line in demo.stdout if (found := LINK.search(line)))
        with start_browser() as browser:
            browser.get(link)
            time.sleep(TRAFFIC_S * 0.75)
            browser.save_screenshot(str(PICTURE))
    finally:
        demo.terminate()
        demo.communicate()


def start_browser() -> webdriver.Chrome:
    """A browser without a window, of the picture's size."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    return browser


if __name__ == "__main__":
    main()
