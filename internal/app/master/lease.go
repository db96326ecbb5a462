package master

import (
	"fmt"
	"log/slog"
	"strings"

	"github.com/urfave/cli/v2"

	"dlrover-run/internal/app/lease"
)

// leaseFlags are the options of an election in Kubernetes.
func leaseFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "ha", Category: severalMasters,
			Usage: "`lease`: masters elect the one that serves in a Lease of Kubernetes, which needs no other server. The " +
				"others wait, and do not listen (default: this is the only master)"},
		&cli.StringFlag{Name: "lease-name", Category: severalMasters, Value: "dlrover-master",
			Usage: "`NAME`: name of the Lease; all masters of an election have the same (default: dlrover-master)"},
		&cli.StringFlag{Name: "lease-namespace", Category: severalMasters,
			Usage: "`NAME`: namespace of the Lease (default: that of the pod)"},
	}
}

// maxLeaseName is that of a name in Kubernetes, less the suffix of the ConfigMap.
const maxLeaseName = 240

// openLease returns the store of --ha=lease.
func openLease(c *cli.Context, log *slog.Logger) (store, error) {
	if way := c.String("ha"); way != "lease" {
		return nil, fmt.Errorf("--ha=%s: need lease", way)
	}
	for _, option := range []string{"lease-name", "lease-namespace"} {
		name := c.String(option)
		odd := func(r rune) bool { return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '-' && r != '.' }
		if c.IsSet(option) && (name == "" || len(name) > maxLeaseName || strings.ContainsFunc(name, odd)) {
			return nil, fmt.Errorf("--%s=%q: need 1 to %d small letters, digits, dots and dashes", option, name, maxLeaseName)
		}
	}
	cfg, err := lease.Locate(c.String("lease-name"), c.String("lease-namespace"), log)
	if err != nil {
		return nil, fmt.Errorf("--ha=lease: %w", err)
	}
	return lease.Open(cfg)
}
