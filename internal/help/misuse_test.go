package help

import (
	"flag"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMisuse(t *testing.T) {
	for arg, want := range map[string]string{
		"--bogus":      "unknown option --bogus; see prog --help",
		"-bogus=3":     "unknown option --bogus; see prog --help",
		"-x":           "unknown option -x; see prog --help",
		"--copies":     "option --copies needs a value; see prog --help",
		`--json=3: "`:  `--json=3: ": takes true, false or no value; see prog --help`,
		"--copies=x":   "--copies=x: need a whole number; see prog --help",
		"--copies=1e9": "--copies=1e9: need a whole number; see prog --help",

		"--copies=99999999999999999999": "--copies=99999999999999999999: value out of range; see prog --help",
	} {
		set := flag.NewFlagSet("prog", flag.ContinueOnError)
		set.SetOutput(io.Discard)
		set.Bool("json", false, "")
		set.Int("copies", 0, "")
		err := set.Parse([]string{arg})
		require.Error(t, err)
		require.EqualError(t, Misuse("prog", err), want)
	}
}
