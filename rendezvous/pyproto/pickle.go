package pyproto

import (
	"errors"
	"fmt"

	"dlrover-run/internal/pickle"
)

// errPickle: the bytes are no message of DLRover's.
var errPickle = errors.New("pyproto: not a message of DLRover")

// maxMessage bounds one message, in bytes. DLRover allows 256 MiB; its largest message, a world of 100,000 nodes, has
// less than 2 MiB.
const maxMessage = 16 << 20

// The values in a message.
type (
	tuple = pickle.Tuple
	List  = pickle.List
	Dict  = pickle.Dict
	Pair  = pickle.Pair
)

// decode reads a pickle as a tree.
func decode(in []byte) (any, error) {
	v, err := pickle.Decode(in, pickle.Limits{Bytes: maxMessage, Objects: true})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errPickle, err)
	}
	return v, nil
}
