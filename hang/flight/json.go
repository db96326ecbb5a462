package flight

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// decodeJSON finds the entries in an object, one after the other: a few bytes of text may be a large entry.
func decodeJSON(dump []byte, add func(*raw)) error {
	in := json.NewDecoder(bytes.NewReader(dump))
	if t, err := in.Token(); err != nil || t != json.Delim('{') {
		err = orNoEntries(err)
		return fmt.Errorf("flight: neither a pickle of protocol 2 to 5 nor JSON of the flight recorder: %w", err)
	}
	found := false
	for in.More() {
		key, err := in.Token()
		if err == nil && key == "entries" {
			found, err = true, decodeList(in, add)
		} else if err == nil {
			err = in.Decode(new(json.RawMessage))
		}
		if err != nil {
			return fmt.Errorf("flight: JSON at byte %d: %w", in.InputOffset(), err)
		}
	}
	if _, err := in.Token(); err != nil {
		return fmt.Errorf("flight: JSON ends in the middle: %w", err)
	}
	if !found {
		return errNoEntries
	}
	return nil
}

func decodeList(in *json.Decoder, add func(*raw)) error {
	if t, err := in.Token(); err != nil || t != json.Delim('[') {
		return orNoEntries(err)
	}
	for in.More() {
		var r raw
		if err := in.Decode(&r); err != nil {
			return err
		}
		add(&r)
	}
	_, err := in.Token()
	return err
}

func orNoEntries(err error) error {
	if err == nil {
		return errNoEntries
	}
	return err
}
