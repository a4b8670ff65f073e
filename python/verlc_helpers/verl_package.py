"""Makes `import verl` work in a helper: the package where it is installed, else the stand-in (python/verlc_standin).

Modules that the installed verl does not have (verl.tools.gsm8k_tool was removed in 0.8) come from the stand-in.  The working
directory comes after both: a checkout of verl there is not an installed one."""

import importlib.abc
import importlib.util
import os
import sys

STANDIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "verlc_standin")


class Missing(importlib.abc.MetaPathFinder):
    """After all other finders: modules of verl that they do not have."""

    def find_spec(self, name, path=None, target=None):
        if not name.startswith("verl."):
            return None
        base = os.path.join(STANDIN, *name.split("."))
        for file, folder in ((os.path.join(base, "__init__.py"), [base]), (base + ".py", None)):
            if os.path.isfile(file):
                return importlib.util.spec_from_file_location(name, file, submodule_search_locations=folder)
        return None


def own(name):
    """The stand-in's module of that name, whatever verl is installed: what reads verlc's files. What it imports is the installed
    verl's."""
    alias = "verlc_standin." + name
    if alias not in sys.modules:
        spec = importlib.util.spec_from_file_location(alias, os.path.join(STANDIN, *name.split(".")) + ".py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[alias] = module
        spec.loader.exec_module(module)
    return sys.modules[alias]


def provide():
    here = os.getcwd()
    sys.path[:] = [p for p in sys.path if p and os.path.abspath(p) not in (STANDIN, here)] + [STANDIN, here]
    if not any(isinstance(f, Missing) for f in sys.meta_path):
        sys.meta_path.append(Missing())
