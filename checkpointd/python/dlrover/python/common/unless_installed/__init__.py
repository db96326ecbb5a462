"""Modules that are imported under the name of the package above, where DLRover is not installed. It has its own."""
