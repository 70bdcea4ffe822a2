"""Makes the pictures of pages in docs/images again, from a run of the quickstart, by a headless Chromium.

python docs/make_pictures.py RUN [--check=FOLDER]   # RUN: e.g. runs/quickstart after `make demo`

Writes report.png, profile.png and views.png. With --check also every page below RUN (report, evaluation) in light and
dark, 1280 and 390 pixels wide, for a look at them.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile

IMAGES = pathlib.Path(__file__).parent / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = (1280, 390)


def screenshot(page: pathlib.Path, target: pathlib.Path, width: int, height: int, *, dark: bool = False) -> None:
    """Writes the top of a page as PNG."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"no browser: install one of {', '.join(BROWSERS)}")
    dark_flags = ["--blink-settings=preferredColorScheme=0"] if dark else ["--blink-settings=preferredColorScheme=1"]
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *dark_flags,
            f"--user-data-dir={profile}", f"--window-size={width},{height}", f"--screenshot={target}",
            page.resolve().as_uri(),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=300)


def only_section(page: pathlib.Path, title: str, folder: pathlib.Path) -> pathlib.Path:
    """Writes a copy of a page whose other sections are hidden; returns its path."""
    text = page.read_text()
    number = text.partition(f">{title}</a>")[0].rpartition('href="#')[2].partition('"')[0]
    hidden = f"<style>header, footer, section:not(#{number}) {{ display: none }}</style></head>"
    copy = folder / "section.html"
    copy.write_text(text.replace("</head>", hidden))
    return copy


def main(run: pathlib.Path, check: str = "") -> None:
    with tempfile.TemporaryDirectory() as folder:
        screenshot(run / "report.html", IMAGES / "report.png", 1280, 1400)
        screenshot(
            only_section(run / "report.html", "Profile", pathlib.Path(folder)), IMAGES / "profile.png", 1280, 1400
        )
    shutil.copy(run / "views.png", IMAGES / "views.png")
    for page in sorted(run.rglob("*.html")) if check else []:
        pathlib.Path(check).mkdir(parents=True, exist_ok=True)
        for width in WIDTHS:
            for dark in (False, True):
                name = f"{page.stem}_{width}_{'dark' if dark else 'light'}.png"
                screenshot(page, pathlib.Path(check) / name, width, 4000, dark=dark)


if __name__ == "__main__":
    given = [word for word in sys.argv[1:] if not word.startswith("--")]
    folders = [word.partition("=")[2] for word in sys.argv[1:] if word.startswith("--check=")]
    if len(given) != 1:
        sys.exit(__doc__)
    main(pathlib.Path(given[0]), *folders)
