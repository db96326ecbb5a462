// checkpointd keeps the checkpoints that workers save in memory, and makes them durable.
package main

import (
	"os"

	"dlrover-run/internal/app/ckptd"
)

func main() { os.Exit(ckptd.Main(os.Args[1:], os.Stdout)) }
