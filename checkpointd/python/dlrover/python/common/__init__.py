import os
from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
__path__.append(os.path.join(os.path.dirname(__file__), "unless_installed"))  # modules that give way to installed ones
