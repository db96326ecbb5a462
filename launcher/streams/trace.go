package streams

import (
	"errors"
	"fmt"
	"io"
)

// CopyTrace copies the trace of a stream that was opened for a profile; note says what is in it.
func CopyTrace(to io.Writer, from io.Reader) (note string, err error) {
	in, size := NewReader(from), 0
	for {
		f, err := in.Next()
		if err != nil || f.Kind == KindEnd {
			return "", errors.New("the connection is lost, or the run is over: there is no trace")
		}
		switch f.Kind {
		case KindOutput:
			if size += len(f.Data); size > MaxTrace {
				return "", fmt.Errorf("more than %d MiB arrive", MaxTrace>>20)
			}
			if _, err := to.Write(f.Data); err != nil {
				return "", err
			}
		case KindNote:
			note = string(f.Data)
		case KindExit:
			var e Exit
			if err := f.Decode(&e); err != nil || e.Code != 0 || e.Error != "" {
				return "", errors.New(e.Error)
			}
			return note, nil
		}
	}
}
