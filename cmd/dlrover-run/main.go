// dlrover-run launches the workers of a distributed training job on this node.
package main

import "dlrover-run/internal/app/run"

func main() { run.Main() }
