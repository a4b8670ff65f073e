"""Python runs this at the start of every interpreter under `verlc exec`: verl's names lead to the stand-in, whatever the
working directory holds. Then the sitecustomize that this one hides."""

import importlib.machinery
import importlib.util
import os
import sys

import verlc_entry

verlc_entry.install()

HERE = os.path.dirname(os.path.abspath(__file__))
hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.abspath(p) != HERE])
if hidden and hidden.loader:
    hidden.loader.exec_module(importlib.util.module_from_spec(hidden))
