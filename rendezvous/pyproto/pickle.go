package pyproto

import (
	"errors"
	"fmt"

	"dlrover-run/internal/pickle"
)

// ErrPickle: the bytes are no message of DLRover's.
var ErrPickle = errors.New("pyproto: not a message of DLRover")

// MaxMessage bounds one message, in bytes. DLRover allows 256 MiB; its largest message, a world of 100,000 nodes, has
// less than 2 MiB.
const MaxMessage = 16 << 20

// The values in a message.
type (
	Tuple  = pickle.Tuple
	List   = pickle.List
	Dict   = pickle.Dict
	Pair   = pickle.Pair
	Object = pickle.Object
	Class  = pickle.Class
)

// Decode reads a pickle as a tree.
func Decode(in []byte) (any, error) {
	v, err := pickle.Decode(in, pickle.Limits{Bytes: MaxMessage, Objects: true})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrPickle, err)
	}
	return v, nil
}
