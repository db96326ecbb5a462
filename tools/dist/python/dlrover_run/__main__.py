"""python -m dlrover_run: the program dlrover-run of this distribution, whatever PATH has under that name."""
import os
import sys

from dlrover_run import find_program

try:
    program = find_program()
except FileNotFoundError as e:
    sys.exit("dlrover_run: %s" % e)
os.execv(program, ["dlrover-run"] + sys.argv[1:])
