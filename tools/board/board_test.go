// Package board checks the board for Grafana against the schema of Grafana's own SDK.
package board

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/cog/plugins"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
)

// faults are the objections of the schema to a board: fields that it does not know, or lacks, and wrong values.
func faults(board string) (found []string) {
	var strict, kept dashboard.Dashboard
	for _, err := range []error{strict.UnmarshalJSONStrict([]byte(board)), json.Unmarshal([]byte(board), &kept),
		kept.Validate()} {
		if err != nil && err.Error() != "" { // the first is never nil
			found = append(found, strings.Split(err.Error(), "\n")...)
		}
	}
	var before, after any
	again, err := json.Marshal(kept)
	if err := errors.Join(err, json.Unmarshal([]byte(board), &before), json.Unmarshal(again, &after)); err != nil {
		return append(found, err.Error())
	}
	for _, p := range kept.Panels {
		if p.Panel != nil && !known(p.Panel.Type) {
			found = append(found, "no panel is called "+p.Panel.Type)
		}
	}
	return append(found, lost(before, after, "board")...)
}

// known reports whether Grafana has panels of a type.
func known(panel string) bool {
	_, known := cog.ConfigForPanelcfgVariant(panel)
	return known
}

// lost are the values that the schema's types do not keep: not all of them are read strictly.
func lost(before, after any, at string) (found []string) {
	switch b := before.(type) {
	case map[string]any:
		a, _ := after.(map[string]any)
		for k, v := range b {
			found = append(found, lost(v, a[k], at+"."+k)...)
		}
	case []any:
		a, _ := after.([]any)
		for i, v := range b {
			if i >= len(a) {
				return append(found, at+" is cut")
			}
			found = append(found, lost(v, a[i], fmt.Sprintf("%s[%d]", at, i))...)
		}
	default:
		if before != after {
			found = append(found, fmt.Sprintf("%s is %v, and %v to Grafana", at, before, after))
		}
	}
	slices.Sort(found)
	return found
}

func TestBoardIsInTheSchema(t *testing.T) {
	plugins.RegisterDefaultPlugins()
	data, err := os.ReadFile("../../docs/monitoring/dlrover-run.json")
	if err != nil {
		t.Fatal(err)
	}
	board := string(data)
	if found := faults(board); len(found) > 0 {
		t.Errorf("the board has faults:\n%s", strings.Join(found, "\n"))
	}
	for right, wrong := range map[string]string{
		`"graphTooltip": 1`: `"graphToolTip": 1`, `"legendFormat"`: `"legendformat"`, `"gridPos"`: `"gridpos"`,
		`"steps"`: `"step"`, `"palette-classic"`: `3`, `"unit"`: `"units"`,
		`"includeAll": true`: `"includeAll": "yes"`, `"w": 24`: `"w": "wide"`, `"showLegend": true`: `"showlegend": true`,
		`"timeseries"`: `"time-series"`,
	} {
		if !strings.Contains(board, right) {
			t.Logf("the board has no %s", right)
		} else if len(faults(strings.Replace(board, right, wrong, 1))) == 0 {
			t.Errorf("%s in place of %s is not found", wrong, right)
		}
	}
}
