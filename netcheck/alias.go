package netcheck

import (
	"crypto/sha256"
	"encoding/hex"
)

// Alias is what others are told of a launcher's ID, which is itself a proof of who speaks: Peer.ID and the IDs of a
// Picture are aliases where they leave the service. The ends of a test call themselves and each other by them.
func Alias(id string) string {
	sum := sha256.Sum256([]byte("dlrover-run netcheck\n" + id))
	return hex.EncodeToString(sum[:12])
}
