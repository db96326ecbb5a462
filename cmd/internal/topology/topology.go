// Package topology loads the file of --topology-file.
package topology

import (
	"fmt"
	"os"

	"dlrover-run/rendezvous"
)

// Load reads lines of `asw psw ip`; the path "" is no topology.
func Load(path string) (rendezvous.Topology, error) {
	if path == "" {
		return nil, nil
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("--topology-file: %w", err)
	}
	defer f.Close()
	return rendezvous.ParseTopology(f)
}
