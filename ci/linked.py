"""Put a distribution and all that it requires into another environment: python ci/linked.py NAME FOLDER.

An installation of torch takes a minute to unpack. An environment that needs nothing but the same files gets
them so, by hard links where they can be made.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement


def closure(name: str) -> dict[str, Distribution]:
    """The distributions that ``name`` requires here, itself among them, by lower-case name."""
    found: dict[str, Distribution] = {}
    waiting = [name]
    while waiting:
        current = waiting.pop().lower()
        if current in found:
            continue
        found[current] = distribution(current)
        for line in found[current].requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


def link(found: Distribution, folder: Path) -> int:
    """Link every file of a distribution below ``folder``; what lies outside, such as commands, is left out."""
    count = 0
    for file in found.files or ():
        if ".." in file.parts:
            continue
        target = folder / file
        source = Path(str(found.locate_file(file)))
        if source.exists() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, target)
            except OSError:  # The folder is on another file system, or on one without links.
                shutil.copy2(source, target)
            count += 1
    return count


def main(arguments: list[str]) -> int:
    """Link what the first argument names into the folder that the second names."""
    if len(arguments) != 2:
        print("linked: expected a distribution and a folder", file=sys.stderr)
        return 2
    name, folder = arguments
    try:
        found = closure(name)
    except PackageNotFoundError as error:
        print(f"linked: {error} is not installed here", file=sys.stderr)
        return 1
    files_count = sum(link(one, Path(folder)) for one in found.values())
    print(f"linked: {files_count} files of {', '.join(sorted(found))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
