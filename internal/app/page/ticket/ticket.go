// Package ticket makes proofs that somebody knows the job token, for browsers. A proof is an expiry and an HMAC of it
// under the token: no list of sessions is kept, and another master with the same token accepts it.
package ticket

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"net/url"
	"time"
)

// Use is the purpose of a proof, so that none can stand for the other.
type Use string

// The uses of a proof.
const (
	Cookie Use = "dlrover page cookie"
	Link   Use = "dlrover page ticket"
)

// LinkTime is how long a link logs its visitor in.
const LinkTime = time.Minute

const (
	clearSize = 16 // the expiry in seconds and random bytes, which make each proof another one
	size      = clearSize + sha256.Size
)

// New is a proof that expires at a time.
func New(token string, use Use, until time.Time) string {
	b := binary.BigEndian.AppendUint64(nil, uint64(until.Unix()))
	b = append(b, make([]byte, clearSize-len(b))...)
	_, _ = rand.Read(b[8:]) // it never fails
	return base64.RawURLEncoding.EncodeToString(append(b, sum(token, use, b)...))
}

func sum(token string, use Use, b []byte) []byte {
	h := hmac.New(sha256.New, []byte(token))
	h.Write([]byte(use))
	h.Write(b)
	return h.Sum(nil)
}

// Proves reports whether text was made with one of the tokens for a use, and has not expired.
func Proves(tokens []string, use Use, text string, now time.Time) bool {
	b, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil || len(b) != size || now.Unix() > int64(binary.BigEndian.Uint64(b)) {
		return false
	}
	for _, token := range tokens {
		if hmac.Equal(sum(token, use, b[:clearSize]), b[clearSize:]) {
			return true
		}
	}
	return false
}

// Query logs the first visitor of the link in, and sends the browser on to a path.
func Query(token, next string, now time.Time) string {
	return url.Values{"ticket": {New(token, Link, now.Add(LinkTime))}, "next": {next}}.Encode()
}
