"""After an interrupted ``pip install``: lets pip install again what it left incomplete.

pip takes a distribution for installed as soon as its metadata is there, whatever else is missing.
"""

from __future__ import annotations

import shutil
import sysconfig
from importlib.metadata import Distribution, distributions
from pathlib import Path


def is_complete(distribution: Distribution) -> bool:
    files = distribution.files
    # Compiled files (.pyc) are listed, but anyone may remove them.
    return bool(files) and all(Path(str(file.locate())).exists() for file in files if file.suffix != ".pyc")


def main() -> None:
    site_packages = sysconfig.get_path("purelib")
    for distribution in distributions(path=[site_packages]):
        metadata = Path(str(distribution.locate_file(""))) / getattr(distribution, "_path", "")
        if metadata.suffix == ".dist-info" and not is_complete(distribution):
            print(f"    incomplete, to be installed again: {metadata.stem}")
            shutil.rmtree(metadata)


if __name__ == "__main__":
    main()
