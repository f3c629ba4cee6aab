"""Link the folders of the package into build/links/statemix, the tree that mypy reads.

The folders lie at the root of the repository and install as statemix.kernels, statemix.transitions, ...; type
checkers follow neither that map nor an editable install, so they get a folder that looks like the installed package.
"""

import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINKS = ROOT / "build" / "links"


def main() -> None:
    """Make the tree anew from the package map in pyproject.toml."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        folders: dict[str, str] = tomllib.load(file)["tool"]["setuptools"]["package-dir"]
    shutil.rmtree(LINKS, ignore_errors=True)
    umbrella = LINKS / "statemix"
    umbrella.mkdir(parents=True)
    for file in (ROOT / folders.pop("statemix")).iterdir():
        (umbrella / file.name).symlink_to(file)
    for package, folder in folders.items():
        name = package.removeprefix("statemix.")
        if "." not in name:  # a package inside a package lies in its folder already
            (umbrella / name).symlink_to(ROOT / folder)


if __name__ == "__main__":
    main()
