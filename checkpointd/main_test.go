package checkpointd_test

import (
	"testing"

	"go.uber.org/goleak"

	"dlrover-run/internal/testkit"
)

// sideBySide bounds the tests that run in parallel: they wait for seconds, and compute little.
const sideBySide = 8

func TestMain(m *testing.M) {
	testkit.SideBySide(sideBySide)
	goleak.VerifyTestMain(m)
}
