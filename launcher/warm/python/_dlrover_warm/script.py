"""What a script is going to import, as far as its source tells; nothing of it is executed."""

import ast
import os
import sys
import tokenize
from importlib.machinery import PathFinder

_MOST = 500  # files of the job that are read

# What a module imports when it is used, and every job uses it: optimizers of PyTorch 2 import this.
LATER = {"torch": "torch._dynamo"}


def _of_the_library():
    """For Python before 3.10: the names of its modules, by their files."""
    place = os.path.dirname(os.__file__)
    files = [f for d in (place, os.path.join(place, "lib-dynload")) if os.path.isdir(d) for f in os.listdir(d)]
    return frozenset(sys.builtin_module_names).union(f.partition(".")[0] for f in files if "-" not in f)


# Modules that read few variables, and those that read known ones and that a script finds in the same place whatever it
# has added to sys.path.
_LIBRARY = frozenset(getattr(sys, "stdlib_module_names", ())) or _of_the_library()
_NEVER_HIDDEN = _LIBRARY | {"torch", "numpy"}

ANY = ""  # the name of a variable that is not known
UNKNOWN = object()  # a value that the source does not tell
# Functions of others that set any variables, and functions of paths that a script may be asked for by name.
_SETS_ANY = "load_dotenv"
_OF_PATHS = {"dirname": os.path.dirname, "abspath": os.path.abspath, "realpath": os.path.realpath,
             "join": os.path.join, "normpath": os.path.normpath, "expanduser": os.path.expanduser,
             "str": str, "Path": str, "fspath": str, "getcwd": os.getcwd, "cwd": os.getcwd,
             "resolve": os.path.realpath, "absolute": os.path.abspath}


def steps(script, is_module):
    """What a script or module does at its top level that concerns imports, in order, and what the job's own modules
    do that it imports. A step is a pair: a module's name, or that of something within a module, and None; or the name
    of a variable, and the function that makes its new value of the old one. The value of a variable that is not set
    is None. What cannot be read does nothing. Beside them: the steps that follow from their use."""
    reader = _Reader(os.getcwd() if is_module else os.path.dirname(os.path.realpath(script)))
    if is_module:
        reader.read_main(script)
    elif os.path.isdir(script):
        reader.own = [script]
        reader.read(os.path.join(script, "__main__.py"))
    else:
        reader.read(script)
    tops = {name.partition(".")[0] for name in reader.names}
    return reader.steps, [(later, None) for name, later in LATER.items() if name in tops]


def becomes(value):
    """The function of a step that sets a variable, or unsets it for None."""
    return lambda old: value


def needs_execution(taken, is_read, environ):
    """Why steps cannot be taken without the script: it sets a variable that later imports read, and its source does
    not tell the value; "": they can. is_read tells which variables imports read."""
    for i, (name, change) in enumerate(taken):
        if change is None or change(environ.get(name)) is not UNKNOWN or name != ANY and not is_read(name):
            continue
        later = [n for n, c in taken[i + 1:] if c is None and n.partition(".")[0] not in _LIBRARY]
        if later:
            return "the script sets %s before it imports %s, and only running it tells how" % (
                "$" + name if name else "variables", later[0])
    return ""


def reads_few_variables(name):
    """Whether a module and those within it are of the libraries whose variables the launcher knows."""
    return name.partition(".")[0] in _NEVER_HIDDEN


def _unknown(old):
    return UNKNOWN


def _is_environ(node):
    return isinstance(node, ast.Name) and node.id == "environ" or isinstance(node, ast.Attribute) and \
        node.attr == "environ" and isinstance(node.value, ast.Name) and node.value.id == "os"


def _is_path(node):
    return isinstance(node, ast.Attribute) and node.attr == "path" and isinstance(node.value, ast.Name) and \
        node.value.id == "sys"


def _text(node):
    """The string that a node is; None: it is something else. Python 3.8 has the first form in older trees only."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _key(node):
    """The string between the brackets of a subscript, or ANY."""
    inner = getattr(node, "value", None) if type(node).__name__ == "Index" else node  # of Python 3.8
    return _text(inner) or ANY


def _called(node):
    """The last name of what is called, or None."""
    return getattr(node.func, "attr", getattr(node.func, "id", None)) if isinstance(node, ast.Call) else None


def _given(text):
    """The change of a variable that gets a text; None: one that is not known."""
    return _unknown if text is None else becomes(text)


def _if_unset(change):
    return lambda old: change(old) if old is None else old


class _Reader:
    def __init__(self, own):
        self.own = [own]  # the directories where the job's own modules are
        self.names = {}
        self.steps = []
        self.seen = set()
        self.blind = False  # sys.path has places that are not known
        self.sets = {_SETS_ANY: [(ANY, _unknown)]}  # functions that set variables
        self.values = {}  # texts, by the names of variables of Python

    def read_main(self, module):
        """Adds what a module imports that -m runs, with the packages that it is in."""
        spec = self._find(module)
        if spec is not None and spec.submodule_search_locations is not None:
            module += ".__main__"
        if spec is not None:
            self._import(module)

    def _find(self, name):
        """The spec of one of the job's own modules; no package is imported."""
        places, spec, at = self.own, None, ""
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
        outer, self.values = self.values, {"__file__": path}
        self._statements(tree.body, package)
        self.values = outer

    def _statements(self, body, package):
        for node in body:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._import(alias.name)
            elif isinstance(node, ast.ImportFrom):
                self._import_from(node, package)
            elif isinstance(node, (ast.Try, ast.With)):
                self._statements(node.body, package)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                changes = [(name, _unknown) for name, _ in self._changes(node)]
                if changes:
                    self.sets[node.name] = changes
            elif not isinstance(node, ast.ClassDef):
                self._other(node)

    def _other(self, node):
        """A statement that imports nothing."""
        changes = self._changes(node)
        if isinstance(node, ast.If):
            changes = self._default(node) or [(name, _unknown) for name, _ in changes]
        elif isinstance(node, (ast.For, ast.While)):
            changes = [(name, _unknown) for name, _ in changes]
        self.steps += changes
        for n in ast.walk(node):
            self._look_for_places(n)
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            self.values[node.targets[0].id] = self._evaluate(node.value)

    def _default(self, node):
        """The change of: if "X" not in os.environ: os.environ["X"] = "value"."""
        test = node.test
        if not (isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotIn) and _text(test.left) and
                _is_environ(test.comparators[0]) and len(node.body) == 1 and not node.orelse):
            return None
        changes = self._changes(node.body[0])
        if len(changes) != 1 or changes[0][0] != test.left.value:
            return None
        change = changes[0][1]
        return [(test.left.value, _if_unset(change))]

    def _changes(self, outer):
        """The changes of variables of the environment within a statement, as steps."""
        found = []
        for node in ast.walk(outer):
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
                given = _text(node.value) if isinstance(node, ast.Assign) else None
                for t in getattr(node, "targets", None) or [node.target]:
                    if isinstance(t, ast.Subscript) and _is_environ(t.value):
                        found.append((_key(t.slice), _given(given)))
            elif isinstance(node, ast.Delete):
                found += [(_key(t.slice), becomes(None)) for t in node.targets
                          if isinstance(t, ast.Subscript) and _is_environ(t.value)]
            elif isinstance(node, ast.Call):
                found += self._call(node)
        return [(name, change if name else _unknown) for name, change in found]

    def _call(self, node):
        """The changes by a call."""
        name = _called(node)
        texts = [_text(a) for a in node.args]
        if name in self.sets:
            return self.sets[name]
        if name == "putenv":
            return []  # imports do not see it, but libraries that they load
        if not (isinstance(node.func, ast.Attribute) and _is_environ(node.func.value)):
            return []
        if name == "setdefault" and len(texts) == 2:
            return [(texts[0] or ANY, _if_unset(_given(texts[1])))]
        if name == "pop" and texts:
            return [(texts[0] or ANY, becomes(None))]
        if name == "update":
            pairs = [(k.arg or ANY, _given(_text(k.value))) for k in node.keywords]
            for a in node.args:
                pairs += [(k is not None and _text(k) or ANY, _given(_text(v))) for k, v in zip(a.keys, a.values)] \
                    if isinstance(a, ast.Dict) else [(ANY, _unknown)]
            return pairs
        return [(ANY, _unknown)] if name == "clear" else []

    def _look_for_places(self, node):
        """Notes places that a node adds to sys.path: the modules there are the job's own."""
        args = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if _is_path(node.func.value) and node.func.attr in ("insert", "append", "extend"):
                args = node.args[-1:]
            elif node.func.attr == "addsitedir":
                args = node.args[:1]
        elif isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = getattr(node, "targets", None) or [node.target]
            if any(_is_path(t) or isinstance(t, ast.Subscript) and _is_path(t.value) for t in targets):
                args = [node.value]
        for a in args or []:
            for place in a.elts if isinstance(a, (ast.List, ast.Tuple)) else [a]:
                path = self._evaluate(place)
                if path is None or "-packages" in path:
                    self.blind = True  # the packages of an installation are not read
                else:
                    self.own.append(os.path.abspath(path))

    def _evaluate(self, node):
        """The text of an expression that is a path, in the forms that scripts use; None: it is not known."""
        if isinstance(node, ast.Name):
            return self.values.get(node.id)
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.Add)):
            both = self._evaluate(node.left), self._evaluate(node.right)
            return None if None in both else os.path.join(*both) if isinstance(node.op, ast.Div) else both[0] + both[1]
        if isinstance(node, ast.Attribute) and node.attr in ("parent", "pardir", "curdir"):
            if node.attr != "parent":
                return getattr(os, node.attr)
            path = self._evaluate(node.value)
            return None if path is None else os.path.dirname(path)
        function = _OF_PATHS.get(_called(node))
        if function is None:
            return _text(node)
        args = [self._evaluate(a) for a in node.args]
        if not args and isinstance(node.func, ast.Attribute) and _called(node) in ("resolve", "absolute"):
            args = [self._evaluate(node.func.value)]
        try:
            return None if None in args else function(*args)
        except TypeError:
            return None

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
        return PathFinder.find_spec(name.partition(".")[0], self.own) is not None

    def _import(self, name):
        if not self._is_own(name):
            if name not in self.names and (not self.blind or name.partition(".")[0] in _NEVER_HIDDEN):
                self.names[name] = None
                self.steps.append((name, None))
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
