package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const stream = `{"Action":"start","Package":"p/a"}
{"Action":"run","Package":"p/a","Test":"TestGood"}
{"Action":"output","Package":"p/a","Test":"TestGood","Output":"chatter\n"}
{"Action":"pass","Package":"p/a","Test":"TestGood","Elapsed":12.34}
{"Action":"run","Package":"p/a","Test":"TestNot"}
{"Action":"output","Package":"p/a","Test":"TestNot","Output":"    a_test.go:7: SKIPPED: X IS NOT TESTED\n"}
{"Action":"skip","Package":"p/a","Test":"TestNot","Elapsed":0}
{"Action":"pass","Package":"p/a","Elapsed":12.5}
{"Action":"skip","Package":"p/none","Elapsed":0}
`

func TestReport(t *testing.T) {
	for name, tc := range map[string]struct {
		in, want string
		good     bool
	}{
		"good": {stream, "ok    12.5s p/a\n\nThe slowest:\n  12.3s p/a TestGood\n\n1 TESTS WERE SKIPPED:\n" +
			"  p/a TestNot: SKIPPED: X IS NOT TESTED\n", true},
		"failed": {`{"Action":"output","Package":"p/b","Test":"T","Output":"why\n"}
{"Action":"fail","Package":"p/b","Test":"T"}
{"Action":"output","Package":"p/b","Output":"FAIL\n"}
{"Action":"fail","Package":"p/b","Elapsed":1}
`, "why\nFAIL\n\n1 FAILED:\n  p/b T (0.0s)\nwhy\n", false},
		"not built": {`{"ImportPath":"p/c","Action":"build-output","Output":"undefined: x\n"}
{"ImportPath":"p/c","Action":"build-fail"}
{"Action":"output","Package":"p/c","Output":"FAIL\tp/c [build failed]\n"}
{"Action":"fail","Package":"p/c","FailedBuild":"p/c"}
`, "undefined: x\nFAIL\tp/c [build failed]\n\n1 FAILED:\n  p/c (0.0s)\nundefined: x\n", false},
		"killed": {`{"Action":"run","Package":"p/a","Test":"TestGood"}` + "\n",
			"\n1 FAILED:\n  p/a TestGood: it has not ended\n", false},
		"nothing": {"", "", false},
		"go's":    {"no such package\n", "no such package\n", false},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			require.Equal(t, tc.good, report(strings.NewReader(tc.in), &out))
			require.Equal(t, tc.want, out.String())
		})
	}
}
