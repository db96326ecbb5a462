package checkpointd_test

import (
	"flag"
	"runtime"
	"strconv"
	"testing"

	"go.uber.org/goleak"
)

// sideBySide bounds the tests that run in parallel: they wait for seconds, and compute little.
const sideBySide = 8

func TestMain(m *testing.M) {
	flag.Parse()
	if parallel := flag.Lookup("test.parallel"); parallel.Value.String() == strconv.Itoa(runtime.GOMAXPROCS(0)) {
		_ = parallel.Value.Set(strconv.Itoa(sideBySide)) // a number
	}
	goleak.VerifyTestMain(m)
}
