package ctl

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/internal/app/marks"
	"dlrover-run/internal/app/service"
	"dlrover-run/netcheck"
	"dlrover-run/rendezvous/api"
)

// hostile commands a terminal by ESC and by CSI in one character, feigns a line, and turns the direction of writing.
const hostile = "a\x1b[31m\u009b1m\nfeigned\u202ec"

// fill sets all that a value holds: strings to hostile, numbers to 1, and flags as given.
func fill(v reflect.Value, flags bool, depth int) {
	switch v.Kind() {
	case reflect.String:
		v.SetString(hostile)
	case reflect.Bool:
		v.SetBool(flags)
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		v.SetInt(1)
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(1)
	case reflect.Float32, reflect.Float64:
		v.SetFloat(1)
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			v.Set(reflect.ValueOf(time.Unix(5000, 0)))
			return
		}
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				fill(v.Field(i), flags, depth)
			}
		}
	case reflect.Pointer, reflect.Slice, reflect.Map:
		if depth > 0 {
			fillNew(v, flags, depth-1)
		}
	}
}

// fillNew fills what v points to: one value, one entry, or two elements.
func fillNew(v reflect.Value, flags bool, depth int) {
	one := reflect.New(v.Type().Elem()).Elem()
	fill(one, flags, depth)
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(one.Addr())
	case reflect.Slice:
		v.Set(reflect.Append(v, one, one))
	case reflect.Map:
		key := reflect.New(v.Type().Key()).Elem()
		fill(key, flags, depth)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, one)
	}
}

func filled[T any](flags bool) (v T) {
	fill(reflect.ValueOf(&v).Elem(), flags, 8)
	return v
}

// TestHostileDaemon has a daemon send what commands a terminal in every text that there is.
func TestHostileDaemon(t *testing.T) {
	for _, flags := range []bool{false, true} {
		run := filled[api.RunStatus](flags)
		run.Run = "r"
		checks := filled[netcheck.Picture](flags)
		checks.Pairs[0].From = 0
		answers := map[string]any{
			"/v1/runs": []api.RunStatus{run}, "/v1/nodes": filled[marks.Known](flags),
			"/v1/runs/r/events": filled[api.Events](flags), "/v1/runs/r/verdict": filled[service.Verdict](flags),
			"/v1/runs/r/hang": filled[hang.Picture](flags), "/v1/runs/r/checks": checks,
			"/v1/runs/r/checkpoints": map[string]any{},
		}
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			answer, ok := answers[req.URL.Path]
			if !ok {
				w.WriteHeader(http.StatusConflict)
				answer = map[string]string{"code": "refused", "error": hostile}
			}
			require.NoError(t, json.NewEncoder(w).Encode(answer))
		}))
		defer server.Close()
		for _, line := range []string{
			"runs", "runs --json", "status r", "status r --json", "status r --conditions", "nodes r", "nodes r --json", "nodes",
			"nodes --json", "events r", "events r --json", "verdict r", "verdict r --json", "hang r", "hang r --json", "check r",
			"check r --json", "check r --matrix", "check r --svg", "stop r", "bar r n", "node mark n --reason x", "logs r",
			"exec r 1 -- id", "stacks r",
		} {
			t.Run(line, func(t *testing.T) {
				var out, errs bytes.Buffer
				p := &program{stdin: strings.NewReader(""), stdout: &out, stderr: &errs, now: time.Now,
					env: func(string) (string, bool) { return "", false }}
				p.run(t.Context(), strings.Fields("dlroverctl --master="+server.Listener.Addr().String()+" "+line))
				text := out.String() + errs.String()
				require.NotEmpty(t, text, line)
				for _, r := range text {
					require.False(t, r != '\n' && unicode.In(r, unicode.Cc, unicode.Bidi_Control), "%s: %q", line, text)
				}
				require.NotRegexp(t, `(?m)^feigned`, text, "%s: a line of its own", line)
			})
		}
	}
}
