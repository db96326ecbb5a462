"""Runs a script, a module or code in place of the script of a parent, natively.

The interpreter calls a function of the module runpy, for it believes that its script is a directory. It finds one of
the C functions that it would have called: no Python frame is below the script, and how the script ends is dealt with
by the interpreter itself."""

import ctypes
import functools
import os
import pkgutil
import runpy
import sys

_IGNORE_COOKIE = 0x800 if sys.version_info >= (3, 10) else 0  # code has no encoding of its own


class _CompilerFlags(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_int), ("feature_version", ctypes.c_int)]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.fopen.restype = ctypes.c_void_p


def _exit_if_failed(result, function, arguments):
    """The exception has been printed."""
    if result:
        raise SystemExit(1)


_run_file = ctypes.pythonapi.PyRun_AnyFileExFlags
_run_file.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p]
_run_text = ctypes.pythonapi.PyRun_SimpleStringFlags
_run_text.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
for _f in _run_file, _run_text:
    _f.restype, _f.errcheck = ctypes.c_int, _exit_if_failed
_call = ctypes.pythonapi.PyObject_Call
_call.argtypes = [ctypes.py_object, ctypes.py_object, ctypes.c_void_p]
_call.restype = ctypes.py_object


class _Runpy:
    """Stands for runpy until the interpreter has taken the function."""

    __spec__ = None

    def __init__(self, call, path0):
        self._call, self._path0 = call, path0

    @property
    def _run_module_as_main(self):
        from . import PARENT

        sys.modules["runpy"] = runpy
        sys.path_importer_cache.pop(PARENT, None)
        if sys.path and sys.path[0] == PARENT:
            del sys.path[0]
        if self._path0 is not None:
            sys.path.insert(0, self._path0)
        return self._call


def arrange(command):
    """Makes what the interpreter does next the start of a command. Raises ValueError, SyntaxError or OSError: it has
    to be started afresh."""
    call, path0, argv0 = {"file": _file, "module": _module, "code": _code}[command.kind](command.what)
    _forbid_hidden_modules(path0)
    sys.argv[:] = [argv0] + command.args
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = command.argv
    sys.modules["runpy"] = _Runpy(call, path0)


def _unsafe_path(path):
    """What the interpreter puts before sys.path, unless it is told to put nothing there."""
    return None if getattr(sys.flags, "safe_path", False) or sys.flags.isolated else path


def _file(name):
    path = name
    if sys.version_info >= (3, 9) and not os.path.isabs(name):
        path = os.path.join(os.getcwd(), name)
    if pkgutil.get_importer(path) is not None:  # a directory or an archive
        return runpy._run_module_as_main, path, name
    file = _libc.fopen(os.fsencode(path), b"rbe")
    if not file:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    call = functools.partial(_run_file, file, os.fsencode(path), 1, ctypes.addressof(_flags(0)))
    return call, _unsafe_path(os.path.dirname(os.path.realpath(name))), name


def _module(name):
    return _calling(runpy._run_module_as_main, name, True), _unsafe_path(os.getcwd()), "-m"


def _code(text):
    path0 = _unsafe_path("")
    if sys.version_info >= (3, 13):
        import linecache

        code = compile(text + "\n", "<string>", "exec", dont_inherit=True)
        by_code = hasattr(linecache, "_interactive_cache")  # since 3.13.1
        linecache._register_code(code if by_code else "<string>", text, "<string>")
        return _calling(exec, code, sys.modules["__main__"].__dict__), path0, "-c"
    return functools.partial(_run_text, (text + "\n").encode(), ctypes.addressof(_flags(_IGNORE_COOKIE))), path0, "-c"


_kept = []  # what C has addresses of


def _flags(flags):
    _kept.append(_CompilerFlags(flags, sys.version_info[1]))
    return _kept[-1]


def _calling(function, *args):
    """What calls a function with these arguments, whatever its own are."""
    return functools.partial(_call, function, args, None)


def _forbid_hidden_modules(path0):
    """Raises ValueError if a fresh interpreter would have imported something else by the same name."""
    if path0 is None:
        return
    try:
        names = os.listdir(path0 or ".")
    except OSError:
        return  # an archive
    for name in names:
        module = sys.modules.get(name.partition(".")[0])
        origin = getattr(module, "__file__", None)
        if module is not None and origin is not None and name.endswith((".py", ".so", ".pyc")):
            found = os.path.join(path0 or os.getcwd(), name)
            if os.path.realpath(found) != os.path.realpath(origin):
                raise ValueError("%s hides the module %s, which is imported already" % (found, origin))
