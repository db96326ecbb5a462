package argv

import (
	"flag"
	"testing"

	"go.uber.org/goleak"
)

var update = flag.Bool("update", false, "write the golden files; the torch ones from $TORCH_PYTHON")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// available returns the table with every value allowed, to test the grammar alone.
func available() []Option {
	opts := Options()
	for i := range opts {
		opts[i].Check = nil
	}
	return opts
}

func lookup(env map[string]string) LookupEnv {
	return func(name string) (string, bool) {
		v, ok := env[name]
		return v, ok
	}
}
