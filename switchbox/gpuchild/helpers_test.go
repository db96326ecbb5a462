package gpuchild

import (
	"encoding/json"

	"dlrover-run/switchbox"
)

// printed is a Report as gpucheck would print it.
func printed(r switchbox.Report) []byte {
	text, err := json.Marshal(r)
	if err != nil {
		panic(err)
	}
	return text
}
