"""Screenshots of a page in a real browser."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def screenshot(page: Path, image: Path, *, width: int, height: int, dark: bool = False) -> np.ndarray:
    """Show the page in headless Chromium, without any network, and take a picture.

    Args:
        page: The file.
        image: The PNG to write.
        width: Of the window, pixels.
        height: Likewise.
        dark: Whether the reader prefers dark.

    Returns:
        The picture, of shape (height, width, 3).
    """
    browser = next(filter(None, map(shutil.which, _NAMES)), None)
    if browser is None:
        pytest.skip(f"no browser on PATH: {' or '.join(_NAMES)} (Debian: apt-get install chromium)")
    options = [
        "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={image.parent / 'profile'}", f"--window-size={width},{height}", f"--screenshot={image}",
        # 0: dark, 1: light
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
    ]  # fmt: skip
    subprocess.run([browser, *options, page.as_uri()], check=True, capture_output=True, timeout=120)
    return np.asarray(Image.open(image).convert("RGB"))


def count(picture: np.ndarray, colour: str) -> int:
    """Pixels of exactly this colour, such as ``#2a9d6f``."""
    return int((picture == [int(colour[i : i + 2], 16) for i in (1, 3, 5)]).all(axis=-1).sum())
