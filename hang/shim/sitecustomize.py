# Installs the shim of hang detection and what warm workers need, and gives way to the sitecustomize that would have run
# without it. Every Python that the job starts runs this, so the syntax is that of all versions.
import os
import sys


def _install():
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        if sys.version_info >= (3, 8) and os.environ.get("DLROVER_HANG_DIR"):
            import _dlrover_hang

            _dlrover_hang.install()
    except Exception:
        pass  # whatever it is, the job runs without us
    try:
        if sys.version_info >= (3, 8) and os.environ.get("DLROVER_WARM"):
            import _dlrover_warm

            _dlrover_warm.install()
    except Exception:
        pass
    # Another sitecustomize that looks for the next one does not find this one again. Our package has its own path.
    sys.path[:] = [p for p in sys.path if not p or os.path.abspath(p) != here]


def _next():
    """Runs the next sitecustomize, which takes this one's place. Its errors are reported as if it were the first."""
    this = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize
    except ImportError as e:
        if getattr(e, "name", "sitecustomize") != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = this


_install()
_next()
