"""The script of a parent. It does not run: see _instead_of_the_script. If it does, then nobody will fork."""

import sys

if __name__ == "__main__":
    sys.exit("warm: sitecustomize does not run, or another one: it is hidden by a sitecustomize before it on "
             "PYTHONPATH, or by an option of the interpreter (-E, -I, -S)")
