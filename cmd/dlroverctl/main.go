// dlroverctl shows and manages the state of runs, nodes and checkpoints for operators.
package main

import "dlrover-run/internal/app/ctl"

func main() { ctl.Main() }
