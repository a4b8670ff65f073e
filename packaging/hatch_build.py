"""Where the files of the tarball's tree go in the wheel, and the wheel's tag. hatchling calls it.

The program is a script of the wheel, as it is: pip puts it into the environment's bin/. Everything else is found from
there: share/verlc/python by src/helper/helper_process.c, lib/verlc by src/device/open.c. Headers and the library of users'
programs lie where a compiler of the environment looks: include, lib, lib/pkgconfig."""

import os
import pathlib

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

METADATA = {"pyproject.toml", "hatch_build.py", "LICENSE", "LICENSES"}


def place(path):
    """In the environment, of a file of the tree; documents go together."""
    if path.suffix == ".so":
        return pathlib.Path("lib/verlc") / path
    if path.parts[0] == "python":
        return pathlib.Path("share/verlc") / path
    return path if path.parts[0] in {"share", "include", "lib"} else pathlib.Path("share/doc/verlc") / path


class Hook(BuildHookInterface):
    def initialize(self, version, build_data):
        root = pathlib.Path(self.root)
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + os.environ["VERLC_PLATFORM_TAG"]
        build_data["shared_scripts"][str(root / "verlc")] = "verlc"
        for file in sorted(p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
            path = file.relative_to(root)
            if path.parts[0] not in METADATA | {"verlc"}:
                build_data["shared_data"][str(file)] = str(place(path))
