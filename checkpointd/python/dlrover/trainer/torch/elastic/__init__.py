"""Data and steps of elastic training. Where DLRover is installed its own modules come first: they ask no launcher."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
__path__ = __path__[1:] + __path__[:1]
