"""What a script is going to import, as far as its source tells; nothing of it is executed."""

import ast
import os
import sys
import tokenize
from importlib.machinery import PathFinder

_MOST = 500  # files of the job that are read

# What a module imports when it is used, and every job uses it: optimizers of PyTorch 2 import this.
LATER = {"torch": "torch._dynamo"}


def imports(script, is_module):
    """The names of modules, in the order of their imports, that a script or module imports at its top level, or that
    the job's own modules do that it imports. A name may be of something within a module. What cannot be read has
    none."""
    reader = _Reader(os.getcwd() if is_module else os.path.dirname(os.path.realpath(script)))
    if is_module:
        reader.read_main(script)
    elif os.path.isdir(script):
        reader.own = script
        reader.read(os.path.join(script, "__main__.py"))
    else:
        reader.read(script)
    names = list(reader.names)
    return names + [later for name, later in LATER.items() if name in {n.partition(".")[0] for n in names}]


class _Reader:
    def __init__(self, own):
        self.own = own  # the directory where the job's own modules are
        self.names = {}
        self.seen = set()

    def read_main(self, module):
        """Adds what a module imports that -m runs, with the packages that it is in."""
        spec = self._find(module)
        if spec is not None and spec.submodule_search_locations is not None:
            module += ".__main__"
        if spec is not None:
            self._import(module)

    def _find(self, name):
        """The spec of one of the job's own modules; no package is imported."""
        places, spec, at = [self.own], None, ""
        for part in name.split("."):
            at = at + "." + part if at else part
            spec = PathFinder.find_spec(at, places)
            if spec is None:
                return None
            places = spec.submodule_search_locations or []
        return spec

    def read(self, path, package=""):
        """Adds what a file imports."""
        if path in self.seen or len(self.seen) > _MOST or not path.endswith(".py"):
            return
        self.seen.add(path)
        try:
            with tokenize.open(path) as f:
                tree = ast.parse(f.read())
        except (OSError, SyntaxError, ValueError, RecursionError):
            return
        self._statements(tree.body, package)

    def _statements(self, body, package):
        for node in body:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._import(alias.name)
            elif isinstance(node, ast.ImportFrom):
                self._import_from(node, package)
            elif isinstance(node, ast.Try):
                self._statements(node.body, package)

    def _import_from(self, node, package):
        name = node.module or ""
        if node.level:
            base = package.split(".")[:len(package.split(".")) - node.level + 1]
            name = ".".join([b for b in base if b] + [n for n in [name] if n])
        if not name or name == "__future__":
            return
        self._import(name)
        for alias in node.names:
            if alias.name != "*" and (self._is_own(name) or name in self.names):
                self._import(name + "." + alias.name)

    def _is_own(self, name):
        return PathFinder.find_spec(name.partition(".")[0], [self.own]) is not None

    def _import(self, name):
        if not self._is_own(name):
            self.names.setdefault(name)
            return
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            spec = self._find(".".join(parts[:n]))
            if spec is None or not spec.origin:
                continue
            is_package = spec.submodule_search_locations is not None
            self.read(spec.origin, spec.name if is_package else spec.name.rpartition(".")[0])


def is_within(name):
    """Whether a name is that of something within a module that is imported, and no module."""
    outer, _, inner = name.rpartition(".")
    return bool(outer) and outer in sys.modules and hasattr(sys.modules[outer], inner)
