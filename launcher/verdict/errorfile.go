package verdict

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"dlrover-run/internal/text"
)

// maxErrorFile is the largest error file, in bytes, that is read.
const maxErrorFile = 16 << 20

// maxReport bounds the texts taken from an error file, in bytes.
const maxReport = 64 << 10

// ErrorReport is a worker's own report of its end.
type ErrorReport struct {
	Message   string    // "ValueError: bad batch"
	Traceback string    // "" if the file has none
	Time      time.Time // whole seconds; zero if the file has none
	ExitCode  *int      // set in files that an inner launcher passed on
}

// Splice makes one JSON text of the beginning and the end of one that was too long to be read. The omitted part lies in
// one or more of its strings, which become one.
func Splice(head, end []byte) []byte {
	if i := bytes.LastIndexByte(head, '\\'); i >= max(0, len(head)-len(`\u0000`)) { // perhaps half of an escape
		head = bytes.TrimRight(head[:i], `\`)
	}
	end = bytes.TrimLeft(end, `\`)
	if len(end) > 0 {
		end = end[1:] // which the backslashes may have been for
	}
	all := slices.Concat(head, []byte(ellipsis), end)
	var whole json.RawMessage
	if json.NewDecoder(bytes.NewReader(all)).Decode(&whole) == nil { // fewer objects may begin than end
		return whole
	}
	return all
}

// ParseErrorFile reads an error file of torch's @record in either of its shapes:
//
//	{"message": {"message": "...", "extraInfo": {"py_callstack": "...", "timestamp": "1700000000"}, "errorCode": 1}}
//	{"message": "...", "timestamp": 1700000000}
//
// Only "message" is required; torchrun fails on files that lack more. An error is to be shown next to the exit status:
// a broken file, often because its writer was killed, never hides the failure itself.
func ParseErrorFile(data []byte) (ErrorReport, error) {
	top, err := errorObject(data)
	if err != nil {
		return ErrorReport{}, err
	}
	message, ok := top["message"]
	if !ok {
		return ErrorReport{}, errors.New(`error file has no "message"`)
	}
	inner, ok := object(message)
	if !ok {
		return ErrorReport{Message: text.Ends(jsonText(message), maxReport), Time: timestamp(top["timestamp"])}, nil
	}
	extra, ok := object(inner["extraInfo"])
	if !ok {
		extra = inner // as Splice leaves it
	}
	r := ErrorReport{
		Message:   text.Ends(jsonText(inner["message"]), maxReport),
		Traceback: Ending(jsonText(extra["py_callstack"]), maxReport),
		Time:      timestamp(extra["timestamp"]),
	}
	var code *int
	if json.Unmarshal(inner["errorCode"], &code) == nil {
		r.ExitCode = code
	}
	return r, nil
}

// AmendErrorFile returns the error file of the first failed worker as the launcher passes it on in its own
// TORCHELASTIC_ERROR_FILE: with exitCode as "errorCode" inside "message". As in torchrun, a file with a plain text as
// its message, and exit code 0, are passed on unchanged.
func AmendErrorFile(data []byte, exitCode int) ([]byte, error) {
	top, err := errorObject(data)
	if err != nil {
		return nil, err
	}
	inner, ok := object(top["message"])
	if !ok || exitCode == 0 {
		return bytes.Clone(data), nil
	}
	inner["errorCode"] = json.RawMessage(strconv.Itoa(exitCode))
	if top["message"], err = encode(inner); err != nil {
		return nil, err
	}
	return encode(top)
}

func errorObject(data []byte) (map[string]json.RawMessage, error) {
	switch {
	case len(bytes.TrimSpace(data)) == 0:
		return nil, errors.New("error file is empty")
	case len(data) > maxErrorFile:
		return nil, fmt.Errorf("error file has %d bytes; at most %d are read", len(data), maxErrorFile)
	}
	var top map[string]json.RawMessage
	if err := json.Unmarshal(data, &top); err != nil {
		return nil, fmt.Errorf("error file is not a JSON object: %w", err)
	}
	if top == nil {
		return nil, errors.New("error file is not a JSON object: null")
	}
	return top, nil
}

// object decodes a JSON object; false for anything else.
func object(raw json.RawMessage) (map[string]json.RawMessage, bool) {
	var m map[string]json.RawMessage
	err := json.Unmarshal(raw, &m)
	return m, err == nil && m != nil
}

// jsonText is a JSON string's value, nothing for null and missing values, and the JSON text of anything else.
func jsonText(raw json.RawMessage) string {
	var s string
	if len(raw) == 0 || json.Unmarshal(raw, &s) == nil {
		return s
	}
	return string(raw)
}

// timestamp reads Unix seconds, written as a number or as a string. A value that cannot be a time is the zero time.
func timestamp(raw json.RawMessage) time.Time {
	seconds, err := strconv.ParseFloat(strings.TrimSpace(jsonText(raw)), 64)
	if err != nil || !(seconds >= 1 && seconds < 1<<36) { // negated so that NaN fails too
		return time.Time{}
	}
	return time.Unix(int64(seconds), 0)
}

func encode(m map[string]json.RawMessage) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false) // tracebacks are full of < and >
	if err := enc.Encode(m); err != nil {
		return nil, fmt.Errorf("encode error file: %w", err)
	}
	return bytes.TrimSpace(b.Bytes()), nil
}
