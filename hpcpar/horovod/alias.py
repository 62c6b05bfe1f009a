"""`import horovod` means ours: so an unchanged Horovod script runs.

    from hpcpar.horovod import alias
    alias.install()
    import horovod.torch as hvd      # is hpcpar.horovod.torch

`python -m hpcpar.horovod script.py` does this before the script. A module is one object under both
names, so its classes and its state are the same for whoever asks by either.
"""

from __future__ import annotations

import importlib.util
import multiprocessing.spawn
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

from hpcpar.errors import HpcparError
from hpcpar.launch.keras_variables import prefer_torch

INTERFACE_VERSION = "0.28.1"
"""Value of `horovod.__version__`: the release whose interface this is."""

ALIASES = {
    "horovod.torch": "hpcpar.horovod.torch",
    "horovod.keras": "hpcpar.horovod.keras",
    "horovod.tensorflow.keras": "hpcpar.horovod.keras",
    "horovod.common.basics": "hpcpar.horovod.basics",
    "horovod.common.elastic": "hpcpar.horovod.torch.elastic",
    "horovod.common.exceptions": "hpcpar.horovod.exceptions",
    "horovod.common.process_sets": "hpcpar.horovod.process_sets",
    "horovod.common.util": "hpcpar.horovod.util",
    "horovod.runner.util.threads": "hpcpar.horovod.util",
}
"""Name in Horovod -> ours; `horovod.torch.x` is `hpcpar.horovod.torch.x`."""

NAMESPACES: dict[str, dict[str, str]] = {
    "horovod": {"run": "hpcpar.horovod.runner"},
    "horovod.common": {},
    "horovod.runner": {"run": "hpcpar.horovod.runner"},
    "horovod.runner.util": {},
    "horovod.tensorflow": {},
}
"""Packages that only hold others -> the names in them, and where these are defined."""


NO_TENSORFLOW = (
    ": TensorFlow itself is not part of hpcpar. horovod.tensorflow.keras, or horovod.keras, trains Keras 3 "
    "on torch; for TensorFlow install Horovod itself"
)


class AliasError(HpcparError, ImportError):
    """`horovod` cannot mean ours: the real one is in this process already."""


class _NamespaceLoader(Loader):
    """Loads a package of NAMESPACES."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        names = NAMESPACES[module.__name__]

        def look(name: str) -> Any:
            if name not in names:
                advice = NO_TENSORFLOW if module.__name__ == "horovod.tensorflow" else ""
                raise AttributeError(
                    f"module {module.__name__!r} of hpcpar has no attribute {name!r}{advice}"
                )
            return getattr(import_module(names[name]), name)

        module.__dict__.update(__getattr__=look, __doc__="hpcpar in Horovod's place.")
        if module.__name__ == "horovod":
            module.__dict__["__version__"] = INTERFACE_VERSION


class _AliasLoader(Loader):
    """Hands out our own module for a name of Horovod's."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.own_spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self.name)
        self.own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # It has run under its own name; the import system has just put the other name's spec on it.
        module.__spec__ = self.own_spec


class _Finder(MetaPathFinder):
    """Answers for `horovod` and everything below it, so that no other finder loads a second copy."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != "horovod":
            return None
        if name in NAMESPACES:
            return ModuleSpec(name, _NamespaceLoader(), origin="hpcpar", is_package=True)
        own = own_name(name)
        found = own and importlib.util.find_spec(own)
        if not own or not found:
            if not _is_imported_by(sys._getframe(1)):
                return None  # who only asks whether there is such a module is told that there is none
            raise ModuleNotFoundError(
                f"{name} is not part of hpcpar, which stands in Horovod's place here: it has horovod.torch, "
                f"horovod.keras, horovod.tensorflow.keras, horovod.common and horovod.run; "
                f"for other frameworks install Horovod itself",
                name=name,
            )
        spec = ModuleSpec(name, _AliasLoader(own), origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec


def _is_imported_by(caller: FrameType | None) -> bool:
    """Tell an import from a question (importlib.util.find_spec), which the protocol does not."""
    while caller is not None and caller.f_code.co_name == "_find_spec":
        caller = caller.f_back
    return caller is not None and caller.f_code.co_name == "_find_and_load_unlocked"


def own_name(name: str) -> str | None:
    """Our module for a name of Horovod's: "horovod.torch.mpi_ops" -> "hpcpar.horovod.torch.mpi_ops"."""
    for theirs, ours in ALIASES.items():
        if name == theirs or name.startswith(theirs + "."):
            return ours + name.removeprefix(theirs)
    return None


def installed() -> bool:
    """Return True if `import horovod` means ours in this process."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def install() -> None:
    """Let `import horovod` mean ours, in this process and in its `multiprocessing` children.

    Other programs that are started from here are not touched, but for KERAS_BACKEND=torch where that is not
    set. A second call does nothing.
    errors   AliasError when the real Horovod has been imported
    """
    if installed():
        return
    if "horovod" in sys.modules:
        where = getattr(sys.modules["horovod"], "__file__", None) or "an unknown place"
        raise AliasError(
            f"horovod has been imported from {where}, so it cannot mean hpcpar in this process: "
            f"call hpcpar.horovod.alias.install() before the first `import horovod`"
        )
    sys.meta_path.insert(0, _Finder())
    prefer_torch(os.environ)  # a script may import keras before horovod.keras
    spawn: Any = multiprocessing.spawn
    spawn.get_preparation_data = _with_alias(spawn.get_preparation_data)


class _InstallInChild:
    """Installs the alias where it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return install, ()


def _with_alias(prepare: Callable[[str], dict[str, Any]]) -> Callable[[str], dict[str, Any]]:
    """Add the alias to what a child of `multiprocessing` is told first.

    A child that is not forked imports the script again, whose `import horovod` must mean ours there.
    """

    def prepare_with_alias(name: str) -> dict[str, Any]:
        return {**prepare(name), "horovod": _InstallInChild()}

    return prepare_with_alias
