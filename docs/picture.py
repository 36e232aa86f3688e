"""Writes the console's pictures, of the demo at work: ``make picture``.  It needs Chromium and its driver."""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from selenium import webdriver

PICTURES = {"console.png": ("/", 720), "jobs.png": ("/jobs", 480)}
"""The page of each, and its height."""
WIDTH = 1280
TRAFFIC_S = 40
LINK = re.compile(r"http://127\.0\.0\.1:\d+/\S+")


def main() -> None:
    """Take the pictures when the demo's last consumer has begun, halfway through its traffic."""
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
            for name, (path, height) in PICTURES.items():
                size = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
                browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
                browser.get(f"{link.partition('/enter')[0]}{path}")
                while "running 0" in browser.page_source:  # between two faults of the demo
                    time.sleep(1)
                    browser.refresh()
                browser.save_screenshot(str(Path(__file__).parent / "pictures" / name))
    finally:
        demo.terminate()
        demo.communicate()


def start_browser() -> webdriver.Chrome:
    """A browser without a window."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


if __name__ == "__main__":
    main()
